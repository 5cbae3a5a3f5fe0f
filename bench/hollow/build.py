"""Build the hollow GPU: libraries with the names of CUDA's, for a CUDA build of torch that then
runs without a GPU.

    python bench/hollow/build.py FOLDER

`FOLDER` gets `libcuda.so.1`, `libcudart.so.N`, `libcublas.so.N`, `libcublasLt.so.N` and
`libnccl.so.N` for the torch beside this Python. Functions that torch imports and that are not
written here end in the error "not supported" and name themselves. Needs gcc, nm and the headers of
CUDA, which the wheels of a CUDA build bring.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {
    "libcudart": ["cudart.c"],
    "libcublas": ["cublas.c"],
    "libcublasLt": ["cublaslt.c"],
    "libnccl": ["nccl.c"],
}


def build(folder: Path) -> list[Path]:
    """The libraries in `folder`, in the order in which a process has to load them. A failing gcc is
    CalledProcessError.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed beside this Python")
    torch = Path(spec.origin).parent
    wanted = _wanted([*torch.glob("lib/*.so*")])
    if not any(soname.startswith("libcudart.so") for soname in wanted):
        raise SystemExit(
            "the torch beside this Python is not built for CUDA; .venv/rehearse has one after make"
            " rehearse-gpu"
        )
    of_others = importlib.util.find_spec("bitsandbytes")  # it has a library for each CUDA
    for folder_of in of_others.submodule_search_locations or [] if of_others is not None else []:
        for version, names in _wanted([*Path(folder_of).glob("*_cuda*.so")]).items():
            wanted.get(version, set()).update(names)
    # the wheel of the runtime leaves out some of its headers; Triton brings them all, if of an
    # older CUDA
    headers = [
        *torch.parent.glob("nvidia/*/include"),
        *torch.parent.glob("triton/backends/nvidia/include"),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    for name, sources in SOURCES.items():
        soname = next((each for each in wanted if re.match(rf"{name}\.so", each)), None)
        if soname:
            built.append(_link(folder, soname, sources, wanted[soname], headers, built[:1]))
    built.append(_link(folder, "libcuda.so.1", [], set(), headers, built[:1]))
    built.append(_link(folder, "libnvidia-ml.so.1", ["nvml.c"], set(), headers, built[:1]))
    return built


def _wanted(libraries: list[Path]) -> dict[str, set[str]]:
    """What these libraries import, by the library (as its version) that they import it from."""
    wanted: dict[str, set[str]] = {}
    driver: set[bytes] = set()
    for library in sorted(libraries):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        for name, version in re.findall(r"\bU (\w+)@(\S+)", listed):
            wanted.setdefault(version, set()).add(name)
        for name in re.findall(r"\bU (nccl\w+)$", listed, re.MULTILINE):
            wanted.setdefault("libnccl.so.2", set()).add(name)
        if library.name == "libc10_cuda.so":  # functions of the driver that it looks up by name
            driver = set(re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", library.read_bytes()))
    if driver:
        next(names for version, names in wanted.items() if version.startswith("libcudart")).update(
            map(bytes.decode, driver)
        )
    return wanted


def _link(
    folder: Path,
    soname: str,
    sources: list[str],
    names: set[str],
    headers: list[Path],
    beside: list[Path],
) -> Path:
    text = "".join((HERE / source).read_text() for source in sources)
    written = set(re.findall(r"^API [\w ]+?\W*(\w+)\(", text, re.MULTILINE))
    target = folder / soname
    with tempfile.TemporaryDirectory() as scratch:
        rest = Path(scratch, "rest.c")
        rest.write_text(
            "void hollow_not_made(const char *);\n"
            + "".join(
                f'int {name}() {{ hollow_not_made("{name}"); return 801; }}\n'
                for name in sorted(names - written - {name.removesuffix("_v2") for name in written})
            )
        )
        version = Path(scratch, "version")
        # what stands in for a function of the C library has to have its version
        version.write_text(
            "GLIBC_2.2.5 { _exit; };\n" * ("_exit" in written) + f"{soname} {{ *; }};\n"
        )
        command = [
            "gcc",
            "-O1",
            "-shared",
            "-fPIC",
            "-w",
            *(f"-I{path}" for path in headers),
            *map(str, [*(HERE / s for s in sources), rest]),
        ]
        command += [
            "-o",
            str(target),
            f"-Wl,-soname,{soname}",
            f"-Wl,-rpath,{folder}",
            "-lpthread",
            "-ldl",
        ]
        if names:
            command += [f"-Wl,--version-script,{version}"]
        subprocess.run([*command, "-Wl,--no-as-needed", *map(str, beside)], check=True)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*build(Path(sys.argv[1]).resolve()), sep=":")
