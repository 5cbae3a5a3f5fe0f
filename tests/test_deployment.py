"""`farthing export --serve`: files for vLLM and Vertex AI, and the dollars of a month."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from farthing.after.deployment import parse_place, plan_deployment, write_deployment
from farthing.cli import main
from farthing.errors import InputError
from farthing.models.model_config import known_config
from farthing.models.shapes import read_shape
from farthing.prices.gpus import gpus
from farthing.report.training_log import read_log
from workshop import trained

ROOT = Path(__file__).resolve().parents[1]
VERTEX = "vertex:my-project/us-central1/my-bucket"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of each task."""
    found = {}
    for family in ("llama", "t5", "bert"):
        found[family] = trained(tmp_path_factory.mktemp(family), family, max_steps=1)
    return found


def written(run: Path, folder: Path, serve: str, **wish) -> dict[str, str]:
    """The files beside a model, by name."""
    folder.mkdir(parents=True)
    plan = plan_deployment(run, serve, wish.get("export_format"), wish.get("traffic"))
    write_deployment(plan, folder)
    return {path.name: path.read_text() for path in (folder / "serve").iterdir()}


def test_vllm_gets_the_memory_and_the_precision_of_the_plan(runs, tmp_path, cli):
    words = ["--serve", "vllm", "--traffic", "requests=500/day,input=300,output=100"]
    said = " ".join(cli.out("export", runs["llama"], "--output", tmp_path / "m", *words).split())
    assert "500 requests a day of 300 tokens in and 100 out, in bf16: always on $" in said
    assert "nothing scales to zero by itself" in said
    assert (tmp_path / "m/model.safetensors").exists()
    service = yaml.safe_load((tmp_path / "m/serve/compose.yaml").read_text())["services"]["vllm"]
    assert "--gpu-memory-utilization=0.9" in service["command"]
    assert "--max-model-len=2048" in service["command"], "as long as its positions"
    assert "--dtype=bfloat16" in service["command"]
    assert "--tensor-parallel-size=1" in service["command"]
    assert "--served-model-name=run" in service["command"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    subprocess.run(["sh", "-n", str(tmp_path / "m/serve/serve.sh")], check=True)


def test_a_quantized_format_is_served_as_such(runs, tmp_path):
    files = written(runs["llama"], tmp_path / "m", "vllm", export_format="fp8")
    assert "--kv-cache-dtype=fp8" in files["serve.sh"]
    log, asked = (
        read_log(runs["llama"] / "log.jsonl"),
        plan_deployment(runs["llama"], "vllm", None, None),
    )
    n_out, n_in = log.n_targets / 8, (log.n_tokens - log.n_targets) / 8
    assert (asked.served.traffic.output_tokens, asked.served.traffic.input_tokens) == (n_out, n_in)


def test_vertex_gets_a_model_an_endpoint_and_a_machine(runs, tmp_path, monkeypatch):
    files = written(runs["t5"], tmp_path / "m", VERTEX)
    model = json.loads(files["model.json"])["model"]
    assert model["artifactUri"] == "gs://my-bucket/run"
    assert model["containerSpec"]["env"] == [{"name": "HF_TASK", "value": "text2text-generation"}]
    deployed = json.loads(files["deploy.json"])["deployedModel"]
    assert deployed["model"] == "projects/my-project/locations/us-central1/models/run"
    assert deployed["dedicatedResources"]["minReplicaCount"] == 1
    assert deployed["dedicatedResources"]["machineSpec"]["machineType"]
    zero = json.loads(files["deploy_to_zero.json"])["deployedModel"]["dedicatedResources"]
    assert (zero["minReplicaCount"], zero["initialReplicaCount"]) == (0, 1)
    subprocess.run(["sh", "-n", str(tmp_path / "m/serve/deploy.sh")], check=True)
    config = known_config("google/flan-t5-xl") | {"num_layers": 30, "num_decoder_layers": 30}
    monkeypatch.setattr("farthing.after.deployment.tuned_config", lambda _: config)
    least_bytes = 8 * read_shape(config, "seq2seq").n_parameters
    fitting = [
        offer.usd_per_hour
        for offer in parse_place(VERTEX).offers()
        if offer.n_gpus == 1 and not offer.is_spot and gpus()[offer.gpu].memory_bytes > least_bytes
    ]
    assert plan_deployment(runs["t5"], VERTEX, None, None).offer.usd_per_hour == min(fitting)


def test_what_can_not_be_served_is_refused_before_anything_is_written(runs, tmp_path):
    assert len({offer.provider for offer in parse_place("vllm").offers()}) > 5
    assert {offer.provider for offer in parse_place(VERTEX).offers()} == {"GCP"}
    for text in ("vertex", "vertex:project", "vllm:here", "sagemaker"):
        with pytest.raises(InputError, match="names no server"):
            parse_place(text)
    with pytest.raises(InputError, match="does not know how to serve seq2seq"):
        plan_deployment(runs["t5"], "vllm", None, None)
    with pytest.raises(InputError, match="do not load the format gguf"):
        plan_deployment(runs["llama"], "vllm", "gguf", None)
    with pytest.raises(InputError, match="requests of 2,048 tokens at most"):
        plan_deployment(runs["llama"], "vllm", None, "input=2000,output=100")
    words = ["export", str(runs["t5"]), "--output", str(tmp_path / "m"), "--serve", "vllm"]
    assert main(words) == 2
    assert not (tmp_path / "m").exists()


MESSAGES = """
import json, sys
from google.cloud import aiplatform_v1 as v1, aiplatform_v1beta1 as v1beta1
from google.protobuf.json_format import ParseError
kinds = {"model.json": v1.UploadModelRequest, "endpoint.json": v1.Endpoint,
         "deploy.json": v1.DeployModelRequest, "deploy_to_zero.json": v1beta1.DeployModelRequest}
try:
    for name, text in json.load(sys.stdin).items():
        if name in kinds:
            kinds[name].from_json(text)
    print("taken")
except ParseError:
    print("refused")
"""
COMPOSE = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
import jsonschema, yaml
schemas = Path(find_spec("check_jsonschema").origin).parent / "builtin_schemas/vendor"
schema = json.loads((schemas / "compose-spec.json").read_text())
try:
    jsonschema.validate(yaml.safe_load(json.load(sys.stdin)["compose.yaml"]), schema)
    print("taken")
except jsonschema.ValidationError:
    print("refused")
"""


def verdict(judge: str, files: dict[str, str]) -> str:
    """What another project's own schema says to the files: taken or refused."""
    python = Path(os.environ.get("FARTHING_LAUNCH_TOOLS") or ROOT / ".venv/launch") / "bin/python"
    if not python.exists():
        pytest.skip(f"{python} is not there: `make launch-tools` makes it")
    words = [python, "-c", judge]
    return subprocess.run(
        words, input=json.dumps(files), text=True, stdout=subprocess.PIPE, check=True
    ).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_vertex_takes_the_files(family, runs, tmp_path):
    files = written(runs[family], tmp_path / "m", VERTEX)
    assert verdict(MESSAGES, files) == "taken"


@pytest.mark.slow
@pytest.mark.parametrize("export_format", [None, "fp8"])
def test_compose_takes_the_file(export_format, runs, tmp_path):
    files = written(runs["llama"], tmp_path / "m", "vllm", export_format=export_format)
    assert verdict(COMPOSE, files) == "taken"
