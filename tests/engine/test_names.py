"""What residuals are called: after modules of Linen and NNX, after tags, alike at any size."""

import contextlib
import inspect
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jact
from benchmarks.models import MODELS
from jact.engine.scopes import module_scopes

WIDTH = 64


def names(fun: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The names of what is encoded when `fun` is differentiated by its first argument."""
    return list(jact.make_plan(fun, **options)(*args).codecs)


def batch(size: int = 128) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)


def linear() -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))


def names_in(model: nnx.Module, size: int = 128) -> list[str]:
    graph, state = nnx.split(model)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, state)(x))  # type: ignore[operator]

    return names(loss, state, batch(size))


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.project = linear()

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.project(x))


class Scaled(Layer):
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * super().__call__(x)


class Model(nnx.Module):
    """Holds its layers as it is told, and calls the ones that `choose` returns."""

    def __init__(self, choose: Callable[[Any], list[Any]], **layers: Any) -> None:
        self.choose = choose
        for name, value in layers.items():
            setattr(self, name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.choose(self):
            x = layer(x)
        return x


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x))


class LinenModel(nn.Module):
    def setup(self) -> None:
        self.blocks = [LinenLayer(), LinenLayer()]
        self.head = LinenLayer()

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.blocks[1](x)


def names_in_linen(method: str = "__call__") -> list[str]:
    model = LinenModel()
    variables = jax.eval_shape(model.init, jax.random.key(0), batch())

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(variables, x, method=method))  # type: ignore[arg-type]

    return names(loss, variables, batch())


class TestLinen:
    def test_modules_are_named_by_their_path(self) -> None:
        assert names_in_linen() == [
            "LinenModel/blocks_0/Dense_0/dot_general",
            "LinenModel/blocks_1/Dense_0/dot_general",
            "LinenModel/head/Dense_0/dot_general",
        ]

    def test_other_methods_follow_the_class(self) -> None:
        assert names_in_linen("encode") == ["LinenModel.encode/blocks_1/Dense_0/dot_general"]

    def test_names_do_not_depend_on_the_profiling_setting(self) -> None:
        with nn.override_named_call(False):
            assert len(names_in_linen()) == 3
            assert all(name.startswith("LinenModel/") for name in names_in_linen())

    def test_repeated_operations_are_numbered(self) -> None:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w))

        w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        assert names(loss, w, batch()) == ["dot_general", "dot_general:1", "dot_general:2"]


class TestNnx:
    def test_a_root_is_named_by_its_class_and_a_child_by_its_attribute(self) -> None:
        assert names_in(Layer()) == ["Layer/project/dot_general"]

    def test_without_scopes_nnx_names_nothing(self) -> None:
        # When this fails, Flax names the modules itself, and `module_scopes` can go.
        layer = Layer()
        jaxpr = jax.make_jaxpr(lambda x: layer(x))(batch())
        assert {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns} == {""}

    @pytest.mark.parametrize(
        ("layers", "choose", "expected"),
        [
            (
                lambda: {"blocks": nnx.List([Layer(), Layer()])},
                lambda m: list(m.blocks),
                ["Model/blocks_0/project", "Model/blocks_1/project"],
            ),
            (
                lambda: {"blocks": nnx.data([Layer(), Layer()])},
                lambda m: m.blocks,
                ["Model/blocks_0/project", "Model/blocks_1/project"],
            ),
            (
                lambda: {"heads": nnx.Dict(a=Layer(), b=Layer())},
                lambda m: [m.heads["b"], m.heads["a"]],
                ["Model/heads_b/project", "Model/heads_a/project"],
            ),
            (
                lambda: {"stages": nnx.List([nnx.List([Layer()]), nnx.List([Layer(), Layer()])])},
                lambda m: [m.stages[1][1], m.stages[0][0]],
                ["Model/stages_1_1/project", "Model/stages_0_0/project"],
            ),
            (
                lambda: {"inner": nnx.Sequential(Layer(), jnp.tanh, Layer())},
                lambda m: [m.inner],
                ["Model/inner/layers_0/project", "Model/inner/layers_2/project"],
            ),
            # A grandchild that is called over its parent's head.
            (
                lambda: {"inner": Layer()},
                lambda m: [m.inner.project, jnp.tanh],
                ["Model/inner/project"],
            ),
            # Held by nobody.
            (lambda: {}, lambda m: [Layer()], ["Model/Layer/project"]),
        ],
        ids=["List", "list", "Dict", "nested", "Sequential", "grandchild", "stray"],
    )
    def test_the_path_is_that_of_the_attributes(
        self, layers: Callable[[], Any], choose: Callable[[Any], list[Any]], expected: list[str]
    ) -> None:
        model = Model(choose, **layers())

        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(model(x))

        assert names(loss, batch()) == [f"{path}/dot_general" for path in expected]

    def test_a_shared_module_is_named_by_whoever_calls_it(self) -> None:
        shared = Layer()
        first, second = (Model(lambda m: [m.layer], layer=shared) for _ in range(2))
        both = Model(lambda m: [m.first, m.second, m.first], first=first, second=second)
        assert names_in(both) == [
            "Model/first/layer/project/dot_general",
            "Model/second/layer/project/dot_general",
            "Model/first/layer/project/dot_general:1",
        ]

    def test_a_module_passed_down_is_named_by_the_caller_that_holds_it(self) -> None:
        model = Model(lambda m: [lambda x: m.inner(m.shared, x)], shared=Layer(), inner=Apply())
        assert names_in(model) == ["Model/inner/shared/project/dot_general"]

    def test_super_stays_in_the_scope_of_the_subclass(self) -> None:
        assert names_in(Scaled()) == ["Scaled/project/dot_general"]

    def test_a_call_inherited_from_a_mixin_is_named(self) -> None:
        assert names_in(Mixed()) == ["Mixed/project/dot_general"]
        assert "__call__" not in vars(Mixed)

    def test_several_roots(self) -> None:
        models = [Layer(), Scaled()]

        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(models[1](models[0](x)))

        assert names(loss, batch()) == ["Layer/project/dot_general", "Scaled/project/dot_general"]

    def test_modules_as_arguments(self) -> None:
        # They are pytrees, and what is called is a copy.
        model = Model(lambda m: list(m.blocks), blocks=nnx.List([Layer(), Layer()]))
        found = names(lambda model, x: jnp.sum(model(x)), model, batch())
        assert found == [f"Model/blocks_{i}/project/dot_general" for i in range(2)]

    def test_copies_made_by_transformations_are_named_by_their_class(self) -> None:
        model = Model(lambda m: [nnx.jit(lambda x: nnx.clone(m.layer)(x))], layer=Layer())
        assert names(lambda x: jnp.sum(model(x)), batch()) == ["Model/Layer/project/dot_general"]

    def test_a_module_in_a_jitted_function_is_named_whatever_was_traced_before(self) -> None:
        layer = Layer()
        jitted = jax.jit(lambda x: layer(x))
        jax.make_jaxpr(jitted)(batch())
        assert names(lambda x: jnp.sum(jitted(x)), batch()) == ["Layer/project/dot_general"]
        jaxpr = jax.make_jaxpr(jitted)(batch()).eqns[0].params["jaxpr"]
        assert {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns} == {""}

    def test_a_function_inside_starts_from_a_root_of_its_own(self) -> None:
        inside: list[str] = []

        class Outer(nnx.Module):
            def __init__(self) -> None:
                self.layer = Layer()

            def __call__(self, x: jax.Array) -> jax.Array:
                inside.extend(names(lambda x: jnp.sum(self.layer(x)), batch()))
                return self.layer(x)

        assert names_in(Outer()) == ["Outer/layer/project/dot_general"]
        assert set(inside) == {"Layer/project/dot_general"}


class Apply(nnx.Module):
    def __call__(self, layer: nnx.Module, x: jax.Array) -> jax.Array:
        return layer(x)  # type: ignore[operator]


class Mixin:
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.project(x))  # type: ignore[attr-defined]


class Mixed(Mixin, nnx.Module):
    def __init__(self) -> None:
        self.project = linear()


def _calls() -> dict[type, Any]:
    """The `__call__` of every module class that has one of its own."""
    found, classes = {}, [nnx.Module]
    while classes:
        cls = classes.pop()
        classes.extend(cls.__subclasses__())
        if "__call__" in vars(cls):
            found[cls] = vars(cls)["__call__"]
    return found


@contextlib.contextmanager
def unchanged_classes() -> Iterator[None]:
    before = _calls()
    yield
    assert _calls() == before


class TestInvisible:
    def test_classes_are_restored(self) -> None:
        method = Layer.__call__
        with unchanged_classes():
            with module_scopes():
                with module_scopes():
                    assert Layer.__call__ is not method
                assert Layer.__call__ is not method
            assert Layer.__call__ is method

    def test_classes_are_restored_after_an_exception(self) -> None:
        class Broken(nnx.Module):
            def __call__(self, x: jax.Array) -> jax.Array:
                raise RuntimeError("not today")

        model = Model(lambda m: [m.layer, m.broken], layer=Layer(), broken=Broken())
        with unchanged_classes(), pytest.raises(RuntimeError, match="not today") as error:
            names(lambda x: jnp.sum(model(x)), batch())
        frames = traceback.extract_tb(error.value.__traceback__)
        # The user's frames are all there, and one of ours for each call of a module.
        assert sum(frame.filename.endswith("scopes.py") for frame in frames) == 2
        assert frames[-1].name == "__call__" and frames[-1].filename == __file__
        # What failed leaves no module on the stack of callers.
        assert names_in(Layer()) == ["Layer/project/dot_general"]

    def test_modules_work_and_look_the_same_while_scopes_are_open(self) -> None:
        layer, x = Layer(), jnp.ones((2, WIDTH))
        plain, signature = layer(x), inspect.signature(Layer.__call__)
        with module_scopes():
            assert inspect.signature(Layer.__call__) == signature
            assert inspect.signature(layer).parameters.keys() == {"x"}
            assert Layer.__call__.__qualname__ == "Layer.__call__"
            assert pickle.loads(pickle.dumps(Layer.__call__)) is Layer.__call__
            assert type(layer) is Layer
            assert (layer(x) == plain).all()
            with pytest.raises(TypeError, match="positional argument"):
                layer()  # type: ignore[call-arg]

    def test_a_class_made_inside_and_a_method_replaced_inside_are_left_alone(self) -> None:
        original = Layer.__call__

        def replacement(self: Any, x: jax.Array) -> jax.Array:
            return original(self, x)

        try:
            with module_scopes():

                class New(nnx.Module):
                    def __call__(self, x: jax.Array) -> jax.Array:
                        return x

                method = New.__call__
                Layer.__call__ = replacement  # type: ignore[method-assign]
            assert New.__call__ is method
            assert Layer.__call__ is replacement
        finally:
            Layer.__call__ = original  # type: ignore[method-assign]

    def test_captured_intermediates_are_the_same(self) -> None:
        model = Model(lambda m: list(m.blocks), blocks=nnx.List([Layer(), Layer()]))
        x = jnp.ones((2, WIDTH))

        def capture() -> Any:
            return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)

        plain = capture()
        with unchanged_classes(), module_scopes():
            ours = capture()
        assert jax.tree.structure(ours) == jax.tree.structure(plain)

    def test_threads_do_not_see_each_other(self) -> None:
        layer = Layer()
        opened, done = threading.Event(), threading.Event()
        stacks: set[str] = set()

        def other() -> None:
            opened.wait(timeout=30)
            jaxpr = jax.make_jaxpr(lambda x: layer(x))(batch())
            stacks.update(str(eqn.source_info.name_stack) for eqn in jaxpr.eqns)
            done.set()

        with unchanged_classes():
            thread = threading.Thread(target=other)
            thread.start()
            with module_scopes():
                opened.set()
                assert done.wait(timeout=30)
            thread.join()
        assert stacks == {""}

    def test_overlapping_threads_restore_the_classes(self) -> None:
        found: list[list[str]] = []

        def work() -> None:
            found.extend(names_in(Layer(), 128 + i) for i in range(5))

        with unchanged_classes():
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == [["Layer/project/dot_general"]] * 20

    def test_flax_is_optional(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "flax.nnx")
        monkeypatch.delitem(sys.modules, "flax.linen")
        method = Layer.__call__
        with module_scopes():
            assert Layer.__call__ is method


class TestTags:
    def test_a_tag_names_the_operation_that_it_follows(self) -> None:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            y = checkpoint_name(jnp.tanh(x @ w), "hidden")
            return jnp.sum(checkpoint_name(jnp.tanh(y @ w), "hidden"))

        w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        assert names(loss, w, batch()) == ["hidden", "hidden:1"]

    def test_a_tag_keeps_the_path_of_its_module(self) -> None:
        class Tagged(nnx.Module):
            def __init__(self) -> None:
                self.project = linear()

            def __call__(self, x: jax.Array) -> jax.Array:
                return jnp.tanh(checkpoint_name(self.project(x), "hidden"))

        model = Model(lambda m: list(m.blocks), blocks=nnx.List([Tagged(), Tagged()]))
        assert names_in(model) == [f"Model/blocks_{i}/hidden" for i in range(2)]


class TestStable:
    @pytest.mark.parametrize("model", ["convnet_small", "transformer_small"])
    def test_names_do_not_depend_on_the_batch(self, model: str) -> None:
        small, large = (MODELS[model].task(batch=size, layers=2) for size in (8, 24))
        assert small.loss is not large.loss
        found = [names(t.loss, *t.abstract(), has_aux=True) for t in (small, large)]
        assert found[0] == found[1]
        assert all("/Block_" in name or name.count("/") == 2 for name in found[0])

    def test_nnx_names_do_not_depend_on_the_batch(self) -> None:
        model = Model(lambda m: list(m.blocks), blocks=nnx.List([Layer(), Layer()]))
        assert names_in(model, 128) == names_in(model, 1024)


class TestRules:
    def plan(self, *rules: jact.Rule) -> jact.Plan:
        model = Model(lambda m: list(m.blocks), blocks=nnx.List([Layer(), Layer()]))
        policy = jact.Policy(rules=rules, default="int4")
        return jact.make_plan(lambda model, x: jnp.sum(model(x)), policy)(model, batch())

    @pytest.mark.parametrize("pattern", ["blocks_1/*", "Model/blocks_1/*", "blocks_1/project/*"])
    def test_rules_match_by_module(self, pattern: str) -> None:
        assert self.plan(jact.Rule(pattern, "int8")).bits == {
            "Model/blocks_0/project/dot_general": "int4",
            "Model/blocks_1/project/dot_general": "int8",
        }

    def test_a_rule_that_matches_nothing_warns(self) -> None:
        with pytest.warns(UserWarning, match="'block_1/\\*' matches no residual"):
            assert set(self.plan(jact.Rule("block_1/*", "int8")).bits.values()) == {"int4"}
