"""Whole GPTModels of the real megatron-core: pads in every kind of layer, and nothing of them in
losses, gradients or statistics."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_helpers import (
    config_of,
    import_megatron,
    model_parallel,
    put_checkpoints_back,
    seed_everything,
    without_warnings,
)
from rank_helpers import device_of, needs_own_gpu
from te_helpers import IS_DOUBLE, on_te

from padded_sp import PaddedSeqMeta, seq_meta
from padded_sp.integrations import megatron

pytestmark = pytest.mark.max_ranks(2)

VOCABULARY, PAD = 64, 63
LENGTHS, PADDED = (5, 9, 0, 18), (16, 16, 8, 24)
FILLS = (float("nan"), 1e4)

_DENSE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "qk_layernorm": True,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "rope_type": "rope",
    "rotary_base": 10000,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "add_bias_linear": False,
}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1],
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "add_bias_linear": False,
}
MODELS = {
    "dense": _DENSE | {"num_query_groups": 2, "kv_channels": 16},
    "dense, layer norm": _DENSE | {"normalization": "LayerNorm", "qk_layernorm": False},
    "latent attention": _DENSE | _LATENT,
    "experts": _DENSE | _EXPERTS | {"qk_layernorm": False},
    "latent attention, experts": _DENSE | _LATENT | _EXPERTS,
}


def build(group, kind, ours=True, **options):
    """The model, its parameters the same whatever it is made of."""
    options = MODELS[kind] | options
    experts = options.get("num_moe_experts")
    if experts:
        # gloo gathers no unequal numbers of rows.
        alone = group.size() == 1 or dist.get_backend(group) == "nccl"
        options = {
            "moe_token_dispatcher_type": "alltoall" if alone else "allgather",
            "moe_grouped_gemm": not options.get("fp8"),
            "expert_tensor_parallel_size": group.size(),
        } | options
    config_name = "MLATransformerConfig" if "q_lora_rank" in options else "TransformerConfig"
    config = config_of(group, config_name, **options)
    specs = import_megatron("models.gpt.gpt_layer_specs")
    if experts:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    else:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention="q_lora_rank" in options,
        )
    if ours:
        spec = megatron.padded_sp_layer_spec(spec)
    seed_everything()
    model = without_warnings(
        lambda: import_megatron("models.gpt").GPTModel(
            config, spec, VOCABULARY, max_sequence_length=64, position_embedding_type="rope"
        )
    )
    model = model.to(device_of(group), config.params_dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms, constants when built
                drawn = torch.randn(parameter.shape, generator=generator) / 8
                parameter.add_(drawn.to(parameter))
    return megatron.wrap_gpt_model(model) if ours else model


def meta_of(group, padded=PADDED, lengths=LENGTHS):
    return PaddedSeqMeta.from_seq_lens(
        lengths, padded_lens=padded, tp_size=group.size(), device=device_of(group)
    )


def step(model, group, meta, fill=0.0, label=0):
    """Losses of real tokens, gradients by name, counts of tokens of each expert.

    Pad tokens are a word of their own, whose embedding is ``fill``, and have the label ``label``.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.full((meta.num_rows,), PAD)
    labels = torch.full((meta.num_rows,), label)
    real = ~meta.padding_mask.cpu()
    tokens[real] = torch.randint(1, PAD, (meta.num_tokens,), generator=generator)
    labels[real] = torch.randint(1, PAD, (meta.num_tokens,), generator=generator)
    tokens, labels, real = (x.to(device_of(group)) for x in (tokens, labels, real))
    if group.rank() == group.size() - 1:
        with torch.no_grad():
            model.embedding.word_embeddings.weight[-1] = fill
    model.zero_grad()
    with seq_meta(meta):
        loss = model(
            tokens[None],
            torch.arange(meta.num_rows, device=device_of(group))[None],
            None,
            labels=labels[None],
            packed_seq_params=megatron.to_packed_seq_params(meta),
        )
    loss.float()[0].where(real, 0).sum().backward()
    found = {"loss": loss.detach()[0][real]}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=group)
        found[name] = grad
    for name, module in model.named_modules():
        if getattr(module, "local_tokens_per_expert", None) is not None:
            counts = module.local_tokens_per_expert.clone()
            dist.all_reduce(counts, group=group)
            found[f"{name}, tokens of each expert"] = counts
            module.local_tokens_per_expert.zero_()
    assert all(x.isfinite().all() for x in found.values()) or fill != fill
    return found


def different(a, b):
    """Names of what is not the same bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@on_te
def pads_reach_nothing(group, kind, options):
    meta = meta_of(group)
    with model_parallel(group):
        model = build(group, kind, **options)
        clean = step(model, group, meta)
        assert not different(step(model, group, meta), clean)
        for fill in FILLS:
            assert not different(step(model, group, meta, fill, label=10**6), clean), fill
        plain = build(group, kind, ours=False, **options)
        moved = different(step(plain, group, meta, float("nan")), step(plain, group, meta))
        assert len(moved) > len(clean) / 2  # Megatron's own
        for name in (name for name in clean if "tokens of each expert" in name):
            counted = [x[name].sum() for x in (clean, step(plain, group, meta))]
            topk = model.config.moe_router_topk
            assert counted == [topk * meta.num_tokens, topk * meta.num_rows]


@pytest.mark.parametrize("kind", MODELS)
def test_pads_reach_nothing(ranks, kind):
    ranks.run(pads_reach_nothing, kind=kind, options={})


@pytest.mark.parametrize("balancing", ["aux_loss", "global_aux_loss", "sinkhorn"])
def test_pads_reach_no_balance_of_experts(ranks, balancing):
    options = {"moe_router_load_balancing_type": balancing}
    if balancing == "sinkhorn":
        options |= {
            "moe_aux_loss_coeff": 0.0,
            "moe_router_enable_expert_bias": False,
            "moe_router_score_function": "softmax",
            "moe_router_topk": 1,
        }
    ranks.run(pads_reach_nothing, kind="experts", options=options)


# --- Beside a batch without pads ------------------------------------------------------------------


# Transformer Engine multiplies float32 in TF32 on GPUs.
ROUNDING = 5e-3 if torch.cuda.is_available() else 2e-5


def distance(a, b):
    """The largest relative distance, in the 2-norm, and whose it is."""
    distances = {n: float((a[n] - b[n]).float().norm() / b[n].float().norm()) for n in b}
    return max((d, name) for name, d in distances.items())


@on_te
def equals_the_batch_without_pads(group, kind, options, expert_parallel):
    """In float32, to its rounding: gradients of both losses, and whole numbers exactly."""
    options = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": None} | options
    with model_parallel(group, expert_parallel=expert_parallel):
        if expert_parallel:
            options |= {
                "expert_model_parallel_size": group.size(),
                "expert_tensor_parallel_size": 1,
                "moe_token_dispatcher_type": "alltoall",
            }
        model = build(group, kind, **options)
        baseline = step(model, group, meta_of(group, padded=LENGTHS))
        for padded in (PADDED, (40, 10, 2, 20), (6, 9, 3, 46)):  # one rank has no token of its own
            found = step(model, group, meta_of(group, padded), float("nan"))
            assert distance(found, baseline)[0] < ROUNDING, distance(found, baseline)
        counts = [name for name in baseline if "tokens of each expert" in name]
        assert all(baseline[name].sum() > 0 for name in counts)
        assert bool(counts) == model.config.moe_router_enable_expert_bias
        if IS_DOUBLE:  # the real one has no attention in float32
            expected = step(
                build(group, kind, False, **options), group, meta_of(group, padded=LENGTHS)
            )
            assert distance(baseline, expected)[0] < ROUNDING


@pytest.mark.parametrize("kind", MODELS)
def test_equals_the_batch_without_pads(ranks, kind):
    ranks.run(equals_the_batch_without_pads, kind=kind, options={}, expert_parallel=False)


@pytest.mark.parametrize(
    "options",
    [
        {"moe_router_load_balancing_type": "aux_loss"},
        {"moe_router_load_balancing_type": "global_aux_loss"},
        {"calculate_per_token_loss": True},
        {"moe_z_loss_coeff": None},
    ],
    ids=lambda options: "-".join(f"{name} {value}" for name, value in options.items()),
)
def test_losses_of_experts_are_means_over_real_tokens(ranks, options):
    ranks.run(equals_the_batch_without_pads, kind="experts", options=options, expert_parallel=False)


@needs_own_gpu
def test_experts_may_be_divided(ranks):
    ranks.run(equals_the_batch_without_pads, kind="experts", options={}, expert_parallel=True)


@on_te
def pads_take_no_capacity(group):
    """Tokens that are dropped for want of capacity are those that are dropped without pads, where
    each rank holds the same tokens."""
    options = {
        "moe_expert_capacity_factor": 1.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": False,
        "moe_z_loss_coeff": None,
        "bf16": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": None,
    }
    lengths = (8, 8, 8, 8)
    with model_parallel(group):
        model = build(group, "experts", **options)
        baseline = step(model, group, meta_of(group, lengths, lengths))
        found = step(model, group, meta_of(group, (16,) * 4, lengths), float("nan"))
        assert distance(found, baseline)[0] < ROUNDING


def test_pads_take_no_capacity(ranks):
    ranks.run(pads_take_no_capacity)


# --- FP8 and recomputation ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", ["dense", "latent attention"])
def test_pads_reach_nothing_in_fp8(ranks, kind, recipe):
    fp8 = {"fp8": "e4m3" if recipe == "blockwise" else "hybrid", "fp8_recipe": recipe}
    ranks.run(pads_reach_nothing_in_fp8, kind=kind, options=fp8)


@on_te
def pads_reach_nothing_in_fp8(group, kind, options):
    # Rows that every recipe takes, and whole blocks on each rank.
    total = 128 * group.size()
    meta = meta_of(group, (48, 16, 8, total - 72), (37, 5, 0, total - 80))
    with model_parallel(group):
        # Of features that are no blocks.
        warnings.filterwarnings("ignore", "Cannot quantize input tensor")

        def steps(fill):
            model = build(group, kind, **options)
            return [step(model, group, meta, fill) for _ in range(2)]

        clean = steps(0.0)
        for fill in FILLS:
            for found, expected in zip(steps(fill), clean, strict=True):
                assert not different(found, expected), fill


@on_te
def recomputed_as_computed(group, kind, options):
    """By Megatron's own hand, which calls no layer with a meta."""
    meta = meta_of(group)
    with model_parallel(group), pytest.MonkeyPatch.context() as patch:
        put_checkpoints_back(patch)
        layers = {k: v for k, v in options.items() if "recompute" not in k}
        expected = step(build(group, kind, **layers), group, meta)
        megatron.carry_meta_through_recompute()
        model = build(group, kind, **options)
        for fill in (0.0, *FILLS):
            found = step(model, group, meta, fill)
            assert distance(found, expected)[0] < 1e-2
            if fill == 0.0:
                clean = found
            assert not different(found, clean), fill


@pytest.mark.parametrize(
    "options",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]},
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
            "add_bias_linear": False,  # Megatron returns the bias from its checkpoint, and hangs
        },
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=lambda options: options.get("recompute_modules", ["full"])[0],
)
def test_recomputed_as_computed(ranks, options):
    kind = "experts" if options.get("recompute_modules") == ["moe"] else "dense"
    ranks.run(recomputed_as_computed, kind=kind, options=options)


# --- Checkpoints and bad input --------------------------------------------------------------------


@on_te
def checkpoints_are_megatrons(group, kind):
    with model_parallel(group):
        own, original = (build(group, kind, ours) for ours in (True, False))
        assert list(own.state_dict()) == list(original.state_dict())
        shards = [
            {
                key: (type(x), getattr(x, "global_shape", None), getattr(x, "global_offset", None))
                for key, x in model.sharded_state_dict().items()
            }
            for model in (own, original)
        ]
        assert shards[0] == shards[1]
        original.load_state_dict(own.state_dict())
        own.load_state_dict(original.state_dict())


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_are_megatrons(ranks, kind):
    ranks.run(checkpoints_are_megatrons, kind=kind)


@on_te
def bad_input_is_refused(group):
    meta, device = meta_of(group), device_of(group)
    other = meta_of(group, (8, 16, 8, 32))
    ids = torch.ones(1, meta.num_rows, dtype=torch.long, device=device)

    def call(model, params=None, labels=ids):
        params = megatron.to_packed_seq_params(meta) if params is None else params
        return model(ids, ids, None, labels=labels, packed_seq_params=params)

    with model_parallel(group):
        plain = build(group, "dense", ours=False)
        with pytest.raises(ValueError, match=r"core_attention .* would let pads in"):
            megatron.wrap_gpt_model(plain)
        with pytest.raises(ValueError, match="takes Megatron's GPTModel, got Linear"):
            megatron.wrap_gpt_model([torch.nn.Linear(2, 2)])
        for options, named in (
            ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
            ({"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0},
             "moe_pad_expert_input_to_capacity"),
        ):  # fmt: skip
            options |= {"moe_token_dispatcher_type": "alltoall"}
            if group.size() > 1:
                with pytest.raises(ValueError, match=named):
                    build(group, "experts", **options)
        model = build(group, "dense")
        assert megatron.wrap_gpt_model([model]) == [model]  # twice is once
        with pytest.raises(ValueError, match="no meta"):
            call(model)
        with seq_meta(meta):
            assert call(model).isfinite().all()
            with pytest.raises(ValueError, match="has other boundaries, 5 in 8, 9 in 16"):
                call(model, megatron.to_packed_seq_params(other))
            with pytest.raises(ValueError, match=r"labels must be \[1, 64\]"):
                call(model, labels=ids[:, :-1])
            with pytest.raises(ValueError, match="packed_seq_params is None"):
                model(ids, ids, None, labels=ids)
        with seq_meta(meta_of(group, (16, 16, 8, 32))), pytest.raises(ValueError, match="its meta"):
            call(model)


def test_bad_input_is_refused(ranks):
    ranks.run(bad_input_is_refused)
