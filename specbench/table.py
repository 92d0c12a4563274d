"""`python -m specbench.table`: tables of finished runs, by category and by setting."""

import sys

from specbench.errors import refuse_missing_folders

if __name__ == "__main__":
    refuse_missing_folders(sys.argv[1:])  # before torch is loaded
    from specbench.results.table_command import main

    main()
