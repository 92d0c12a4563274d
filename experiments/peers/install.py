"""Installs other engines, each in an environment of its own, and converts checkpoints for them, the shipped pair if no
others are given.

python experiments/peers/install.py [--folder outputs/peers] [PEER...]

Packages come from PyPI; llama.cpp is built from the sources in llama-cpp-python's source distribution. What is done
already is skipped. An engine that cannot be installed is told in one sentence, and the others go on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from converted import name_of

FOLDER = Path("outputs/peers")
SHIPPED = Path(__file__).resolve().parents[2] / "specbench" / "shipped"
PAIR = (SHIPPED / "target", SHIPPED / "drafter")
TORCH = ("torch>=2.11,<2.14", "transformers>=5.17,<6")
LLAMA = "llama-cpp-python==0.3.36"  # its source distribution has llama.cpp in it
GGUF = ("f32", "f16", "q8_0")
CMAKE = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF",
         "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF")  # fmt: skip
# The converter knows tokenizers by a hash, but not those of all checkpoints; requests are token ids, so that how text
# is split does not matter. It looks for a SentencePiece model first, with a library that need not be there.
CONVERT = """
import runpy, sys
script = sys.argv.pop(1)
sys.path.insert(0, script.rpartition("/")[0])
from conversion.base import TextModel
def absent(self):
    raise FileNotFoundError
TextModel._create_vocab_sentencepiece = absent
known = TextModel.get_vocab_base_pre
def splitting(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"
TextModel.get_vocab_base_pre = splitting
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


class InstallError(Exception):
    """Why a step failed, in one sentence."""


class Installer:
    """Steps towards one engine in a folder; each leaves a mark when it is done, and is skipped from then on. `models`
    are folders of checkpoints."""

    def __init__(self, folder: Path, models: Sequence[Path] = PAIR):
        self.folder, self.models = folder.resolve(), models

    def once(self, step: str, do: Callable[[], object]) -> None:
        """Does what was not done before. Raises InstallError."""
        mark = self.folder / "done" / step
        if not mark.exists():
            print(f"peers: {step}", flush=True)
            do()
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def call(self, step: str, *command: str | Path) -> None:
        """Runs a command with low priority; what it prints goes to a log. Raises InstallError."""
        log = self.folder / "logs" / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            try:
                done = subprocess.run(
                    [str(word) for word in command], stdout=file, stderr=file, preexec_fn=lambda: os.nice(19)
                )
            except OSError as error:
                raise InstallError(f"{step}: {error}") from error
        if done.returncode:
            raise InstallError(f"{step}: {Path(command[0]).name} ended with exit code {done.returncode}, see {log}")

    def environment(self, name: str, *packages: str) -> Path:
        """The `bin` of a virtual environment with these packages."""
        home = self.folder / "envs" / name

        def make() -> None:
            venv.create(home, with_pip=True)
            self.call(f"{name}-packages", home / "bin" / "python", "-m", "pip", "install", "-q", *packages)

        self.once(f"{name}-packages", make)
        return home / "bin"

    def convert(self, step: str, model: str, out: Path, *command: str | Path) -> None:
        """Makes `out` by a command."""

        def make() -> None:
            shutil.rmtree(out, ignore_errors=True)  # of a command that was cut off
            out.parent.mkdir(parents=True, exist_ok=True)
            self.call(f"{step}-{model}", *command)

        self.once(f"{step}-{model}", make)


def llama(at: Installer) -> None:
    """llama.cpp's `llama-server`, and the checkpoints as GGUF. The converter runs in this environment."""
    sources, build = at.folder / "src", at.folder / "build" / "llama"

    def fetch() -> None:
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python")
        at.call("llama-fetch", *pip, "-d", sources, LLAMA)
        with tarfile.open(next(sources.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")

    def compile_server() -> None:
        at.call("llama-configure", "cmake", "-S", tree, "-B", build, *(f"-D{option}" for option in CMAKE))
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count())
        at.call("llama-build", "cmake", "--build", build, "-j", jobs, "--target", "llama-server")

    at.once("llama-fetch", fetch)
    tree = next(sources.glob("llama_cpp_python-*/vendor/llama.cpp"))
    at.once("llama-build", compile_server)
    for model in at.models:
        for kind in GGUF:
            out = at.folder / "gguf" / f"{name_of(model)}-{kind}.gguf"
            script = (sys.executable, "-c", CONVERT, tree / "convert_hf_to_gguf.py", model)
            at.convert(f"gguf-{kind}", name_of(model), out, *script, "--outtype", kind, "--outfile", out)


def openvino(at: Installer) -> None:
    """openvino-genai, and the checkpoints as OpenVINO's IR, whose converter needs an older transformers."""
    at.environment("openvino", "openvino-genai==2026.4.1.0")
    tools = at.environment("openvino_convert", "optimum-intel[openvino]==2.2.0", "transformers<5.6", "scipy")
    for model in at.models:
        out = at.folder / "openvino" / name_of(model)
        export = (tools / "optimum-cli", "export", "openvino", "-m", model)
        options = ("--task", "text-generation-with-past", "--weight-format", "fp32")
        at.convert("openvino", name_of(model), out, *export, *options, out)


def onnxruntime(at: Installer) -> None:
    """onnxruntime-genai, and the shipped pair as ONNX, made by its own builder."""
    tools = at.environment("onnxruntime", "onnxruntime-genai==0.18.0", "onnx", "onnx-ir", *TORCH)
    home = at.folder / "onnxruntime"
    for model in PAIR:
        build = (tools / "python", "-m", "onnxruntime_genai.models.builder", "-i", model)
        out = home / model.name
        at.convert("onnxruntime", model.name, out, *build, "-o", out, "-p", "fp32", "-e", "cpu", "-c", home / "hub")
    at.once("onnxruntime-pair", lambda: onnxruntime_pair(home))


def onnxruntime_pair(home: Path) -> None:
    """The folder of a target with a draft model: the target's files, and the drafter in its configuration."""
    shutil.copytree(home / "target", home / "pair", dirs_exist_ok=True)
    config, drafter = (json.loads((home / model / "genai_config.json").read_text()) for model in ("pair", "drafter"))
    config["model"]["draft"] = drafter["model"]["decoder"] | {"filename": "../drafter/model.onnx"}
    config["speculative"] = {"max_draft_tokens": 4}  # requests set their own
    (home / "pair" / "genai_config.json").write_text(json.dumps(config, indent=1))


def economize(at: Installer) -> None:
    """economize, on torch."""
    at.environment("economize", "economize==0.3.2", *TORCH)


def flashspec(at: Installer) -> None:
    """flashspec, on torch."""
    at.environment("flashspec", "flashspec==0.3.1", *TORCH)


ANY = ("llama", "openvino")  # which convert any checkpoint
STEPS = {"llama": llama, "openvino": openvino, "onnxruntime": onnxruntime, "economize": economize,
         "flashspec": flashspec}  # fmt: skip


def install(folder: Path, peers: Sequence[str], models: Sequence[Path] = PAIR) -> list[str]:
    """Installs these engines, and converts these checkpoints; returns those that are there now. Prints why the others
    are not."""
    there = []
    for peer in peers:
        try:
            STEPS[peer](Installer(folder, models))
            there.append(peer)
        except (InstallError, OSError, StopIteration) as error:
            print(f"peers: {peer} is left out, it could not be installed ({error or type(error).__name__})")
    return there


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments and converted models are kept")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(STEPS)}; all if none is named")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(STEPS):
        parser.error(f"{', '.join(sorted(unknown))}: no such engine, choose of {', '.join(STEPS)}")
    sys.exit(0 if len(install(args.folder, args.peers or [*STEPS])) == len(args.peers or STEPS) else 1)
