"""Recipes out: what `dump_recipe` writes loads as the same recipe; every setting is described; the table in the docs is the one in the code."""

import dataclasses
import tomllib

import pytest
from hypothesis import assume, example, given, settings, strategies as st
from tiers import times

from phalanx.api.recipe_words import as_word
from phalanx.core.config import CheckpointConfig, DataConfig, OptimConfig, Recipe, RunConfig
from phalanx.core.recipe import dump_recipe, load_recipe
from phalanx.core.rules import LIMITS, inert_settings, recipe_problems, value_of
from phalanx.core.settings import Setting, describe_settings, section_docs, sections

pytestmark = pytest.mark.unit
SETTINGS = {s.name: s for s in describe_settings()}


def scalars(setting: Setting) -> st.SearchStrategy[object]:
    limit = LIMITS.get(setting.name)
    if setting.choices:
        return st.sampled_from(setting.choices)
    if setting.base is bool:
        return st.booleans()
    if setting.base is int:
        low = int(limit.least) if limit and limit.least is not None else None
        high = int(min(2**40, limit.ceiling if limit.most is None else limit.most)) if limit else 2**40
        return st.integers(low, high)
    if setting.base is float:
        floats = st.floats(allow_nan=False, allow_infinity=False)
        return floats.filter(limit.allows) if limit else floats
    return st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))


def values(setting: Setting) -> st.SearchStrategy[object]:
    one = scalars(setting)
    if (limit := LIMITS.get(setting.name)) and setting.base is float:
        low = limit.least if limit.least is not None else limit.above
        high = (
            limit.most
            if limit.most is not None
            else limit.below
            if limit.below is not None
            else min(1e9, limit.ceiling)
        )
        one = st.floats(
            low, high, exclude_min=limit.least is None, exclude_max=limit.most is None and high == limit.below
        )
    some = st.lists(one, min_size=1, max_size=3).map(tuple) if setting.many else one
    return st.none() | some if setting.optional else some


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A legal recipe with a handful of settings changed (to any value); those that clash are put back to their defaults."""
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=12, unique=True))
    changed = {n: draw(values(SETTINGS[n])) for n in names}
    recipe = with_values(Recipe(), changed)
    for _ in range(4):
        wrong = {p.where for p in recipe_problems(recipe)}
        recipe = with_values(recipe, {n: SETTINGS[n].default for n in wrong})
    assume(not recipe_problems(recipe))
    return recipe


def with_values(recipe: Recipe, changed: dict[str, object]) -> Recipe:
    for name, value in changed.items():
        section, key = name.split(".")
        part = dataclasses.replace(getattr(recipe, section), **{key: value})
        recipe = dataclasses.replace(recipe, **{section: part})
    return recipe


NASTY = Recipe(
    run=RunConfig(name='qu"ote', folder="tab\t new\nline \x7f \u2028 é \U0001f600 \\"),
    data=DataConfig(sources=("a, b.txt", "#c.jsonl", "'"), weights=(1e-9, 1e12, 0.1)),
    optim=OptimConfig(schedule="constant", lr=5e-324),
    checkpoint=CheckpointConfig(interval=0),
)


@settings(deadline=None, max_examples=times(150, 30))
@given(recipe=recipes())
@example(recipe=Recipe())
@example(recipe=NASTY)
def test_load_of_dump_is_the_same_recipe(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    text = dump_recipe(recipe)
    path.write_text(text)
    assert load_recipe(path, []) == recipe
    assert dump_recipe(load_recipe(path, [])) == text


@pytest.mark.parametrize("name", ["data.sources", "data.weights", "run.folder"])
def test_a_setting_from_python_is_the_word_of_a_command_line(name: str) -> None:
    recipe = dataclasses.replace(
        NASTY, data=dataclasses.replace(NASTY.data, sources=("a\x7f", "\U0001f600, \\", '"\n'))
    )
    words = (f"--{n}={as_word(value_of(recipe, n))}" for n in {name, "data.sources"})
    assert value_of(load_recipe(None, [*words]), name) == value_of(recipe, name)


@settings(deadline=None, max_examples=times(100, 40))
@given(data=st.data())
def test_every_value_also_survives_the_command_line(data: st.DataObject) -> None:
    setting = SETTINGS[data.draw(st.sampled_from(sorted(SETTINGS)))]
    value = data.draw(values(setting))
    if isinstance(value, tuple):
        text = str(list(value)) if setting.base is not str else None
    else:
        text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    assume(text is not None)
    if text == "none":  # the word of a choice where there is one, else "not set"
        value = "none" if "none" in setting.choices else None if setting.optional else value
    assert setting.from_text(text) == value


def test_what_does_nothing_is_not_written() -> None:
    text = dump_recipe(NASTY)
    table = tomllib.loads(text)
    assert "min_lr_ratio" not in table["optim"] and "asynchronous" not in table["checkpoint"]
    assert '# min_lr_ratio: no effect because optim.schedule = "constant"' in text
    assert "# warmup_steps: not set." in text
    assert tomllib.loads(dump_recipe(Recipe()))["checkpoint"]["asynchronous"] is True


def test_an_illegal_recipe_is_written_as_it_is() -> None:
    """Nothing is swept under the carpet: what has no effect and was changed is in the file, and loading says so."""
    recipe = Recipe(optim=OptimConfig(decay_steps=5))
    assert tomllib.loads(dump_recipe(recipe))["optim"]["decay_steps"] == 5


def test_every_setting_and_section_says_what_it_means() -> None:
    assert len(SETTINGS) == sum(len(dataclasses.fields(cls)) for cls in sections().values())
    assert [s.name for s in SETTINGS.values() if not s.doc] == []
    assert all(section_docs().values())
    assert set(LIMITS) <= set(SETTINGS)
    unlimited = {s.name for s in SETTINGS.values() if s.base in (int, float) and not s.choices} - set(LIMITS)
    assert unlimited == set(), "a number without a range"
    by_name = SETTINGS["model.qk_norm"]
    assert (by_name.type_text, by_name.default_text, by_name.optional) == ("none | head | hidden", "not set", True)
    assert SETTINGS["data.sources"].type_text == "str, ..."
    assert SETTINGS["data.sources"].default_text == '"builtin:python"'


def test_inert_settings_of_the_defaults_are_all_unset_or_default() -> None:
    for name in inert_settings(Recipe()):
        assert value_of(Recipe(), name) == SETTINGS[name].default
