"""The columns of the zoo: a model distributed in one way, and compared with the same model in one process."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ferrodist as fd
from ferrodist import checkpoint
from ferrodist.checkpoint.convert import export_hugging_face
from ferrodist.parallel.pipeline import Pipeline
from model_zoo.families import NO_TEXT, Batch, Family
from model_zoo.outcomes import NotApplicableError, Outcome, WrongResultError, find_error, on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

NUM_STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}

State = dict[str, torch.Tensor]


def full_state(model: nn.Module) -> State:
    """The full tensors of a model, by the names of its ``state_dict()``, and on all ranks."""
    state = model.full_state_dict() if isinstance(model, fd.FSDP) else model.state_dict()
    return {name: each.full_tensor() if isinstance(each, fd.DTensor) else each for name, each in state.items()}


def train(family: Family, model: nn.Module, batch: Batch) -> State:
    """Steps of AdamW with clipping: the losses, the norms, and the model's state afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    figures = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = family.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        figures += [loss.detach().double(), torch.as_tensor(float(norm), dtype=torch.float64)]
    return {**full_state(model), "losses and norms": torch.stack(figures)}


def mesh_of(group: Backend) -> fd.DeviceMesh:
    """All ranks along one axis."""
    return fd.DeviceMesh(group, (-1,), ("ranks",))


def parallelized(family: Family, model: nn.Module, group: Backend) -> nn.Module:
    """The model under its own plan, its family's, or one by hand."""
    return fd.parallelize(model, mesh_of(group), "auto" if family.plan is None else family.plan)


def sharded(family: Family, model: nn.Module, group: Backend) -> fd.FSDP[Any]:
    """The model in FSDP, with its blocks as units."""
    return fd.FSDP(model, group, wrap=family.is_block)


def part_of(batch: Batch, index: int, count: int) -> Batch:
    """Some of a batch's rows."""
    return {name: each.tensor_split(count)[index] for name, each in batch.items()}


def tensor(family: Family) -> Outcome:
    """Tensor parallelism by "auto", over 2 ranks."""
    model, batch = family.model(), family.batch()
    expected = train(family, copy.deepcopy(model), batch)

    def program(group: Backend) -> float:
        return find_error(train(family, parallelized(family, model, group), batch), expected)

    reason = "" if family.plan is None else 'a plan by hand, since "auto" has none'
    return Outcome(kind="ok", error=max(on_ranks(program)), reason=reason)


def experts(family: Family) -> Outcome:
    """Whole experts on each of 2 ranks, to which tokens travel; all else is replicated."""
    if not family.experts:
        raise NotApplicableError("it has no experts")
    model, batch = family.model(), family.batch()
    expected = train(family, copy.deepcopy(model), batch)

    def program(group: Backend) -> float:
        mine = fd.parallelize(model, mesh_of(group), {family.experts: fd.ExpertParallel()})
        return find_error(train(family, mine, batch), expected)

    return Outcome(kind="ok", error=max(on_ranks(program)))


def write(model: nn.Module, prompt: Batch, way: str) -> torch.Tensor:
    """The tokens that a model writes."""
    torch.manual_seed(5)
    with torch.no_grad():
        return model.generate(  # type: ignore[no-any-return, operator]
            **copy.deepcopy(prompt), max_new_tokens=6, **WAYS[way]
        )


def texts_of_one_process(family: Family, prompts: list[Batch]) -> dict[str, list[torch.Tensor]]:
    """The texts for each prompt in each way that one process has."""
    found = {}
    for way in WAYS:
        model = family.model().eval()
        try:
            found[way] = [write(model, each, way) for each in prompts]
        except Exception:  # noqa: BLE001, S112 - transformers can't do it, whatever it says
            continue
    if not found:
        raise NotApplicableError("transformers itself generates no text with it")
    return found


def compare_texts(model: nn.Module, prompts: list[Batch], expected: dict[str, list[torch.Tensor]], rank: int) -> None:
    """Raise WrongResultError unless a rank writes the texts of one process for its prompts."""
    for way, texts in expected.items():
        for index in range(rank % len(prompts), len(prompts), len(prompts)):
            found = write(model, prompts[index], way)
            if type(found) is not torch.Tensor or found.tolist() != texts[index].tolist():
                raise WrongResultError(f"other tokens than those of one process: {way}")


def missing_ways(expected: dict[str, Any]) -> str:
    """What an "ok" of texts is without."""
    left = [way for way in WAYS if way not in expected]
    return f"without {' and '.join(left)}, which transformers can't do with it" if left else ""


def generate(family: Family) -> Outcome:
    """Texts under tensor parallelism over 2 ranks: greedy, sampled with a seed, and by beams."""
    if family.prompt is None:
        raise NotApplicableError(NO_TEXT)
    prompts = [family.prompt]
    expected = texts_of_one_process(family, prompts)

    def program(group: Backend) -> None:
        compare_texts(parallelized(family, family.model().eval(), group), prompts, expected, 0)

    on_ranks(program)
    return Outcome(kind="ok", reason=missing_ways(expected))


def fsdp_generate(family: Family) -> Outcome:
    """Texts in FSDP over 2 ranks, each with prompts of its own."""
    if family.prompt is None:
        raise NotApplicableError(NO_TEXT)
    prompts = [family.prompt, {name: each.flip(0)[:1] for name, each in family.prompt.items()}]
    expected = texts_of_one_process(family, prompts)

    def program(group: Backend) -> None:
        fsdp = sharded(family, family.model().eval(), group)
        fd.register_forward_method(fsdp, "generate")
        compare_texts(fsdp, prompts, expected, group.rank)

    on_ranks(program)
    return Outcome(kind="ok", reason=missing_ways(expected))


def context(family: Family) -> Outcome:
    """A sequence that is sharded over 2 ranks, with attention by the ring and by Ulysses; gradients averaged by DDP."""
    is_causal = family.context
    if isinstance(is_causal, str):
        raise NotApplicableError(is_causal)
    batch = {name: each for name, each in family.batch().items() if name in {"input_ids", "labels"}}
    model = family.model()
    alone = copy.deepcopy(model)
    scores = alone(**batch)["logits"].double()
    shifted = batch["labels"][:, 1:]
    expected = nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), shifted.flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}

    def program(group: Backend) -> float:
        errors = []
        for method in ("ring", "ulysses"):
            ddp = fd.DDP(copy.deepcopy(model), group)
            part = fd.context_shard_batch(batch, group)
            count, labels = part.pop("num_items_in_batch"), part.pop("shift_labels")
            if not hasattr(model, "config"):
                part.pop("position_ids"), part.pop("attention_mask")
            with fd.context_parallel(mesh_of(group), method, causal=is_causal):
                logits = ddp(**part)["logits"].double()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
                loss.backward()
            mean = fd.allreduce(loss.detach(), fd.ReduceOp.MEAN, group=group)
            found = {name: each.grad for name, each in ddp.module.named_parameters() if each.grad is not None}
            errors.append(find_error({**found, "loss": mean}, {**gradients, "loss": expected}))
        return max(errors)

    return Outcome(kind="ok", error=max(on_ranks(program)))


def pipeline(family: Family) -> Outcome:
    """The model in 2 stages of a pipeline, with 2 microbatches, and the model's own loss."""
    model, batch = family.model(), family.batch()
    output = family.own_loss or (lambda result: result["loss"])
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for index in range(2):
            loss = output(alone(**part_of(batch, index, 2)))
            (loss / 2).backward()
            losses.append(loss.detach().double())
        optimizer.step()
    expected = full_state(alone)

    def program(group: Backend) -> float:
        stages = fd.split_model(model, 2, group, sample=part_of(batch, 0, 2), output=output)
        pipe = Pipeline(stages, group, 2)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        found: list[float] = []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            pipe.step(batch)
            found += pipe.losses
            optimizer.step()
        state = pipe.state_dict()
        if set[str]().union(*fd.all_gather_object(list(state), group=group)) != set(expected):
            raise WrongResultError("the stages' states together don't have the model's names")
        error = find_error(state, {name: each for name, each in expected.items() if name in state})
        figures = torch.tensor(found, dtype=torch.float64)
        return max(error, find_error({"losses": figures}, {"losses": torch.stack(losses)}))

    return Outcome(kind="ok", error=max(on_ranks(program)))


def compile_in_fsdp(family: Family) -> Outcome:
    """The compiled model in FSDP over 2 ranks, each with half of the batch if its loss can be divided."""
    model, batch = family.model(), family.batch()
    expected = train(family, copy.deepcopy(model), batch)

    def program(group: Backend) -> float:
        model.compile(backend="eager")
        part = part_of(batch, group.rank, 2) if family.is_divisible else batch
        found = train(family, sharded(family, model, group), part)
        figures = found.pop("losses and norms")
        error = find_error(found, {name: each for name, each in expected.items() if name in found})
        mean = fd.allreduce(figures, fd.ReduceOp.MEAN, group=group)
        return max(error, find_error({"losses": mean}, {"losses": expected["losses and norms"]}))

    return Outcome(kind="ok", error=max(on_ranks(program)))


def save_and_load(family: Family) -> Outcome:
    """Saved by tensor parallelism and by FSDP, loaded into the other over 3 ranks, and as a Hugging Face folder."""
    expected = full_state(family.model())
    with tempfile.TemporaryDirectory() as folder:
        reason = ""
        ways: list[Callable[..., nn.Module]] = [sharded]
        try:
            on_ranks(lambda group: _save(parallelized(family, family.model(), group), f"{folder}/parallelized"))
            ways.append(parallelized)
        except Exception:  # noqa: BLE001 - the column of tensor parallelism says why
            reason = "by FSDP alone, without tensor parallelism"
        on_ranks(lambda group: _save(sharded(family, family.model(), group), f"{folder}/sharded"))
        for saved, wrap in zip([way.__name__ for way in ways], reversed(ways), strict=True):

            def program(group: Backend, saved: str = saved, wrap: Callable[..., nn.Module] = wrap) -> float:
                model = wrap(family, family.model(seed=1), group)
                checkpoint.load_distributed(f"{folder}/{saved}", {"model": model}, group=group)
                return find_error(full_state(model), expected)

            if max(on_ranks(program, 3 if wrap is sharded else 2)):
                raise WrongResultError(f"saved {saved}, then loaded: other values")
            export_hugging_face(f"{folder}/{saved}", f"{folder}/{saved} exported", part="model")
            if find_error(_load_folder(family, Path(f"{folder}/{saved} exported")), expected):
                raise WrongResultError(f"saved {saved}, then exported: other values")
    return Outcome(kind="ok", reason=reason)


def _save(model: nn.Module, path: str) -> None:
    checkpoint.save_distributed({"model": model}, path)


def _load_folder(family: Family, folder: Path) -> State:
    """The state of the model that transformers loads from a folder, or torch without transformers."""
    model: Any = family.model(seed=1)
    if not hasattr(model, "config"):
        from safetensors.torch import load_file  # noqa: PLC0415 - for models without a folder's configuration

        model.load_state_dict(load_file(folder / "model.safetensors"))
        return full_state(model)
    model.config.save_pretrained(folder)
    return full_state(type(model).from_pretrained(folder, dtype=torch.float64, local_files_only=True))


COLUMNS: dict[str, Callable[[Family], Outcome]] = {
    "tensor": tensor,
    "generate": generate,
    "experts": experts,
    "context": context,
    "FSDP generate": fsdp_generate,
    "pipeline": pipeline,
    "compile": compile_in_fsdp,
    "checkpoint": save_and_load,
}
"""The columns by name, in the order of the page."""
