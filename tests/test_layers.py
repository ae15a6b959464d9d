"""The layers against the libraries they come from, and the state contract at their boundaries."""

import copy

import pytest
import timm
import torch
from conftest import TINY
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from models.build import build_layers, layer_names
from models.layer import Layer, repeated_names, set_autocast, set_recompute
from models.losses import Objectives, Targets
from models.schema import validate
from models.spec import ModelSpec
from models.state import State, StateError, example_state


def tiny(**changes: object) -> ModelSpec:
    """The tiny spec with ``section__key=value`` changed."""
    data = copy.deepcopy(TINY)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = data
        for section in sections:
            place = place[section]
        place[key] = value
    return validate(data, ModelSpec, "test")


def targets_of(spec: ModelSpec, state: tuple[Tensor, ...]) -> Targets:
    rows = len(state[0])
    labels = torch.randint(0, spec.text.vocab_size, (rows, spec.masked_positions))
    return Targets(labels, state[4][:, :2])


def loss_and_gradients(spec: ModelSpec, layers: list[Layer], state: tuple[Tensor, ...]) -> tuple[float, dict]:
    torch.manual_seed(7)
    targets = targets_of(spec, state)
    network = nn.Sequential(*layers)
    network.zero_grad()
    loss = Objectives(spec)(network(state), targets).total
    loss.backward()
    return loss.item(), {
        name: value.grad.clone() for name, value in network.named_parameters() if value.grad is not None
    }


def run(layers: list[Layer], state: tuple[Tensor, ...], prefix: str) -> State:
    for layer in layers:
        if layer.name.startswith(prefix):
            state = layer(state)
    return State(*state)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_text_tower_equals_transformers_with_padding(attention: str) -> None:
    spec = tiny(attention=attention)
    layers = build_layers(spec)
    text = spec.text
    config = BertConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.width,
        num_hidden_layers=text.layers,
        num_attention_heads=text.heads,
        intermediate_size=text.feed_forward,
        max_position_embeddings=text.positions,
        attn_implementation=attention,
    )
    bert = BertModel(config, add_pooling_layer=False).eval()
    bert.embeddings.load_state_dict(
        layers[layer_names(spec).index("text.embed")].module.embeddings.state_dict()
    )
    for index, theirs in enumerate(bert.encoder.layer):
        ours = layers[layer_names(spec).index(f"text.layer.{index}")]
        theirs.load_state_dict(ours.module.layer.state_dict())
    state = State(*example_state(spec, 6))
    mask = torch.ones_like(state.mask)
    for row, length in enumerate((12, 9, 2, 5, 12, 7)):
        mask[row, length:] = False
    ours = run([layer.eval() for layer in layers], tuple(state._replace(mask=mask)), "text.").text
    theirs = bert(input_ids=state.text, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_tiny_patch16_224", 32),
        ("vit_tiny_patch16_224", 48),
        ("deit_tiny_distilled_patch16_224", 32),
        ("vit_base_patch16_siglip_gap_224", 32),
        ("vit_small_patch14_reg4_dinov2", 28),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_image_tower_equals_timm(name: str, size: int, attention: str) -> None:
    patch = 14 if "patch14" in name else 16
    spec = tiny(attention=attention, image__timm=name, image__size=size, image__patch=patch)
    layers = build_layers(spec)
    sizes = {"img_size": size, "patch_size": patch, "embed_dim": 32, "depth": 2, "num_heads": 2}
    pool = "token" if "distilled" in name else ""
    vit = timm.create_model(name, num_classes=0, global_pool=pool, **sizes).eval()
    weights = dict(layers[0].module.vit.state_dict())
    for index in range(2):
        block = layers[1 + index].module.block
        weights |= {f"blocks.{index}.{key}": value for key, value in block.state_dict().items()}
    weights |= {f"norm.{key}": value for key, value in layers[3].module.block.state_dict().items()}
    vit.load_state_dict(weights)
    state = example_state(spec, 3)
    ours = run([layer.eval() for layer in layers], state, "image.").image
    torch.testing.assert_close(ours, vit.forward_features(state[0]), atol=1e-5, rtol=1e-5)


def test_names_are_known_without_building() -> None:
    spec = tiny()
    assert layer_names(spec) == [layer.name for layer in build_layers(spec, device="meta")]
    assert layer_names(spec) == [
        *("image.embed", "image.block.0", "image.block.1", "image.norm"),
        *("text.embed", "text.layer.0", "text.layer.1"),
        *("fusion.embed", "fusion.layer.0", "fusion.layer.1", "head"),
    ]


def test_same_seed_gives_same_weights_whatever_ran_before() -> None:
    first = nn.Sequential(*build_layers(tiny(), seed=5)).state_dict()
    torch.rand(17)
    second = nn.Sequential(*build_layers(tiny(), seed=5)).state_dict()
    other = nn.Sequential(*build_layers(tiny(), seed=6)).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_fusion_of_a_pair_does_not_depend_on_the_other_pairs() -> None:
    """K captions share the image's keys: each must come out as if it were alone with the image."""
    spec = tiny()
    layer = next(layer for layer in build_layers(spec) if layer.name == "fusion.layer.0").eval()
    text, image = torch.randn(4, 2, 12, 32), torch.randn(4, 5, 32)
    mask = torch.rand(4, 2, 12) > 0.3
    mask[:, :, 0] = True
    rest = (
        torch.zeros(4, 4, dtype=torch.int32),
        mask,
        torch.ones(4, 2, dtype=torch.bool),
        torch.ones(4, 2).long(),
    )
    both = State(*layer((image, text, *rest))).text
    for pair in range(2):
        alone = (rest[0], mask[:, pair : pair + 1], rest[2], rest[3])
        single = State(*layer((image, text[:, pair : pair + 1], *alone))).text
        torch.testing.assert_close(both[:, pair : pair + 1], single, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("objectives", [("itc",), ("itm",), ("mlm",), ("itc", "itm", "mlm")])
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_every_trainable_parameter_gets_a_gradient(objectives: tuple[str, ...], pooling: str) -> None:
    chosen: dict[str, dict] = {name: {} for name in objectives}
    if "itc" in chosen:
        chosen["itc"] = {"pooling": pooling}
    spec = tiny(objectives=chosen)
    layers = build_layers(spec)
    _, gradients = loss_and_gradients(spec, layers, example_state(spec, 8))
    missing = [name for name, _ in nn.Sequential(*layers).named_parameters() if name not in gradients]
    if objectives == ("itc",):
        # ITC is computed before the fusion: its layers are built but have nothing to learn from.
        fusion = [index for index, layer in enumerate(layers) if layer.name.startswith("fusion.layer")]
        missing = [name for name in missing if int(name.split(".")[0]) not in fusion]
    assert missing == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recomputation_gives_the_same_gradients_with_dropout_on(attention: str) -> None:
    spec = tiny(
        attention=attention,
        text__dropout=0.2,
        text__attention_dropout=0.2,
        fusion__dropout=0.2,
        image__drop_path=0.2,
    )
    state = example_state(spec, 8)
    layers = build_layers(spec)
    plain = loss_and_gradients(spec, layers, state)
    for reentrant in (False, True):
        assert set_recompute(layers, ["image.block.*", "text.*", "fusion.*", "head"])
        for layer in layers:
            layer.reentrant = reentrant
        again = loss_and_gradients(spec, layers, state)
        assert plain[0] == again[0] and plain[1].keys() == again[1].keys()
        for name, gradient in plain[1].items():
            torch.testing.assert_close(again[1][name], gradient)


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_tower_below_recomputed_layers_still_trains_them(reentrant: bool) -> None:
    spec = tiny(image__frozen=True, text__frozen=True)
    layers = build_layers(spec)
    set_recompute(layers, repeated_names(layers))
    for layer in layers:
        layer.reentrant = reentrant
    _, gradients = loss_and_gradients(spec, layers, example_state(spec, 8))
    trainable = [name for name, value in nn.Sequential(*layers).named_parameters() if value.requires_grad]
    assert sorted(gradients) == sorted(trainable) and trainable


def test_autocast_holds_in_a_worker_thread_and_in_recomputation() -> None:
    from concurrent.futures import ThreadPoolExecutor

    spec = tiny()
    layers = build_layers(spec)
    set_autocast(layers, torch.bfloat16)
    set_recompute(layers, repeated_names(layers))
    seen: list[torch.dtype] = []
    layer = next(layer for layer in layers if layer.name == "text.layer.1")
    layer.module.layer.intermediate.dense.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    with ThreadPoolExecutor(1) as worker:
        outputs = worker.submit(nn.Sequential(*layers), example_state(spec, 8)).result()
    Objectives(spec)(outputs, targets_of(spec, example_state(spec, 8))).total.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert outputs[2].dtype == torch.float32  # ITC features


def test_no_tensor_of_batch_times_length_times_vocabulary_exists() -> None:
    spec = tiny(text__vocab_size=5000)
    state = example_state(spec, 8)
    layers = build_layers(spec)
    targets = targets_of(spec, state)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            out = function(*arguments, **(keywords or {}))
            for item in out if isinstance(out, tuple) else (out,):
                if isinstance(item, Tensor) and item.shape[:1] == (8,):
                    largest = max(largest, item.numel())
            return out

    with Watch():
        Objectives(spec)(nn.Sequential(*layers)(state), targets).total.backward()
    assert 0 < largest < 8 * spec.text.length * 5000


BROKEN = {
    "mask for all rows at once": (
        lambda s: s._replace(mask=s.mask[:1, None, None]),
        "'mask' has 1 rows where 8",
    ),
    "a slot is missing": (lambda s: tuple(s)[:5], "tuple of 6"),
    "one tensor": (lambda s: s.image, "not Tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_state_that_would_lose_rows_is_refused_at_the_boundary(case: str) -> None:
    spec = tiny()
    change, words = BROKEN[case]
    broken = change(State(*example_state(spec, 8)))
    with pytest.raises(StateError, match=words):
        build_layers(spec)[0](tuple(broken) if isinstance(broken, State) else broken)


def test_layer_that_drops_rows_is_refused() -> None:
    class Half(nn.Module):
        def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
            return tuple(tensor[: len(tensor) // 2] for tensor in slots)

    with pytest.raises(StateError, match=r"out of half: 'image' has 4 rows where 8"):
        Layer("half", Half())(example_state(tiny(), 8))
