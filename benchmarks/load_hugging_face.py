"""Peak memory and time of loading a folder of Hugging Face's into a model over two ranks.

    python benchmarks/load_hugging_face.py [--layers 7] [--rounds 3] [--folder /path/on/the/disk]

A Llama of random weights, 1,024 wide, is written to a folder. In each round two processes make it on the meta device,
shard it, and load the folder: by `parallelize` with the model's own plan, by `FSDP` with a unit for each layer, and
whole, by transformers' ``from_pretrained``. "Peak" is the most resident memory that a rank has from before the model
is made until it is loaded, above what it had; the larger rank's, the median of the rounds. What was loaded is compared
with what was written, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("parallelize", "FSDP", "from_pretrained")


def make_config(layers: int) -> transformers.LlamaConfig:
    """The model, of 51 MB a layer and 66 MB for embeddings and head."""
    return transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8000,
    )


def checksum(model: torch.nn.Module) -> float:
    """A sum that depends on each element of the first layer's weights and of the head."""
    found = 0.0
    for name, value in model.state_dict().items():
        if ".layers.0." in name or "head" in name:
            full = value.full_tensor() if isinstance(value, fd.DTensor) else value
            found += float((full.double() * torch.arange(full.numel()).view(full.shape).remainder(97)).sum())
    return found


def load(way: str, group: fd.Backend, folder: str, config: transformers.LlamaConfig) -> Any:
    """Make and load the model."""
    model: Any
    if way == "from_pretrained":
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        for parameter in model.parameters():  # which are in the files until they are read
            parameter.data = parameter.data.clone()
        return model
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    if way == "parallelize":
        fd.parallelize(model, fd.DeviceMesh(group, (group.world_size,), ("tensor",)), "auto", init="empty")
    else:
        model = fd.FSDP(model, group, wrap=type(model.model.layers[0]), init="empty")
    return fd.checkpoint.load_hugging_face(folder, model, group=group)


def program(group: fd.Backend, folder: str, layers: int, way: str) -> tuple[int, float, float]:
    """What each rank runs: peak bytes, seconds, and the checksum."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with torch.device("meta"):  # what is imported for the first model counts for nothing
        transformers.LlamaForCausalLM(make_config(1))
    found: list[Any] = []
    start = time.perf_counter()
    peak = measure_memory(lambda: found.append(load(way, group, folder, make_config(layers))))
    seconds = time.perf_counter() - start
    model = found[0]
    if way == "FSDP":
        with model.summon_full_params():
            return peak, seconds, checksum(model.module)
    return peak, seconds, checksum(model)


def write(_: fd.Backend, folder: str, layers: int) -> tuple[int, float]:
    """Write a model of random weights, and return its bytes and the checksum."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    model: Any = transformers.LlamaForCausalLM(make_config(layers))
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(one.nbytes for one in model.parameters()), checksum(model)


def measure_memory(function: Callable[[], Any]) -> int:
    """The peak of resident bytes during a call, above those before it."""
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    function()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        size, expected = run_ranks(write, 1, folder, arguments.layers, backend="native", timeout=300)[0]
        print(f"a model of {size / 1e6:.0f} MB on two ranks, float32; torch {torch.__version__},", end=" ")
        print(f"transformers {transformers.__version__}\n\n| | peak of a rank, MB | seconds |\n|---|---|---|")
        found: dict[str, list[tuple[int, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way in WAYS:
                ranks = run_ranks(program, 2, folder, arguments.layers, way, backend="native", timeout=300)
                assert all(total == expected for *_, total in ranks), f"{way} has loaded other numbers"
                found[way].append((max(peak for peak, *_ in ranks), max(seconds for _, seconds, _ in ranks)))
        for way, rounds in found.items():
            peaks, times = zip(*rounds, strict=True)
            print(f"| {way} | {statistics.median(peaks) / 1e6:.0f} | {statistics.median(times):.1f} |")


if __name__ == "__main__":
    main()
