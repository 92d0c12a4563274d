"""`python -m specbench.table`: tables of finished runs, by category and by setting."""

from specbench.results.table_command import main

if __name__ == "__main__":
    main()
