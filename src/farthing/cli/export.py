"""`farthing export`: the trained model of a run as an adapter, merged, or in fewer bits. Changes
nothing in the run folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from farthing.cli.console import print_json
from farthing.cli.parser import RUN, run_folder
from farthing.errors import EXIT_FINISHED, InputError
from farthing.printable import printable
from farthing.storage.files import Json, bytes_below, read_json

ARGUMENTS = {
    **RUN,
    "--output FOLDER!": "new folder for the model",
    "--format {adapter,merged,gguf,fp8,w8a16,w4a16}": (
        "format of the model (default: merged; with --serve the cheapest to serve)"
    ),
    "--serve SERVER": "also write files for a server: vllm, or vertex:PROJECT/REGION/BUCKET",
    "--traffic TRAFFIC": (
        'traffic for --serve, such as "requests=2000/day,input=800,output=200,latency=2s"'
    ),
    "--data FILE": "judge the export on these examples instead of the run's held-out ones",
    "--push hub:NAME": "publish the model on the Hugging Face Hub (token: HF_TOKEN)",
    "--public": "with --push: make the repository public (default: private)",
    "--json": "print the written files as JSON",
}
RARE = {
    "--dtype {float32,bfloat16,float16}": "dtype of the merged weights",
    "--bits BITS": "GGUF type: f32, f16, bf16, q8_0 (default), q4_0; with llama.cpp q4_k_m ...",
    "--max-kl NATS:float": (
        "reject the export if KL from the merged model exceeds NATS (default: 0.1)"
    ),
    "--force": "keep the export despite --max-kl",
}


def run(arguments: argparse.Namespace) -> int:
    run = run_folder(arguments)
    if arguments.public and not arguments.push:
        raise InputError("it needs --push", where="--public", to_do="leave it out")
    if arguments.traffic and not arguments.serve:
        raise InputError("it needs --serve", where="--traffic", to_do="add --serve")
    if arguments.serve and arguments.push:
        what = "a served model is not published by the same command"
        raise InputError(what, where="--serve, --push", to_do="export twice")
    if not arguments.serve:
        arguments.format = arguments.format or "merged"
        written = _publish(run, arguments) if arguments.push else _write(run, arguments)
    else:
        from farthing.after.deployment import plan_deployment, write_deployment

        plan = plan_deployment(run, arguments.serve, arguments.format, arguments.traffic)
        arguments.format = plan.export_format
        written = _write(run, arguments)
        lines = write_deployment(plan, Path(arguments.output))
        written |= {"server": arguments.serve, "notes": [*written.get("notes", ()), *lines]}
    if arguments.json:
        print_json(written)
        return EXIT_FINISHED
    from farthing.units import say_bytes

    size = f"({written['format']}, {say_bytes(written['bytes'])})"
    print(f"wrote {printable(written['folder'])} {size}")
    for line in (written.get("method"), written.get("judged_in_words"), *written.get("notes", ())):
        if line:
            print(f"  {printable(line)}")
    if one := written.get("published"):
        print(f"published as hub:{printable(one['to'])}, commit {printable(one['commit'])}")
    return EXIT_FINISHED


def _publish(run: Path, arguments: argparse.Namespace) -> Json:
    """Write the model, or take the one that the same command has written, and send it."""
    from farthing.export.folders import refuse_used
    from farthing.export.publish import announce, noted, publish, wanted_at
    from farthing.report.receipt import leave_receipt

    output = Path(arguments.output)
    form = " ".join(filter(None, (arguments.format, arguments.bits, arguments.dtype)))
    is_private = not arguments.public
    wanted = wanted_at(arguments.push, output, form, is_private=is_private, where="--push")
    if noted(run, output, form):
        size = bytes_below(output)
        written: Json = {"folder": str(output), "format": arguments.format, "bytes": size}
        if (said := output / "export.json").exists():
            written |= read_json(said)
    else:
        refuse_used(output)
        announce(run, wanted)
        written = _write(run, arguments)
    try:
        return written | {"published": publish(run, wanted).to_json()}
    finally:
        leave_receipt(run)


def _write(run: Path, arguments: argparse.Namespace) -> Json:
    from farthing.after.quantized import export_as

    return export_as(
        run,
        Path(arguments.output),
        arguments.format,
        dtype=arguments.dtype,
        bits=arguments.bits,
        max_kl=arguments.max_kl,
        is_forced=arguments.force,
        data=None if arguments.data is None else Path(arguments.data),
        trust_remote_code=arguments.trust_remote_code,
    )
