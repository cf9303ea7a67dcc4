"""Tasks of lm-evaluation-harness as YAML files describe them, read as a stranger's: a file says what is asked, and runs nothing.

The harness takes much more from such a file: functions by name (`!function`), data sets of a hub with code of their own, metrics of a hub, further files. Only what is listed
here is taken, and it reaches the harness as plain data. Its templates (Jinja) run in an immutable sandbox (`harness.py`).

Must never change: reading a task imports, fetches and executes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, Problem, first_line, nearest
from phalanx.core.reading import MalformedError, read_text

MOST_BYTES = 1 << 20
MOST_TASKS = 1000
DATA = ("json", "csv", "parquet", "text")
"""Values of `dataset_path`: formats of local files."""
METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "brier_score", "mcc", "f1"),
    "generate_until": ("exact_match", "bleu", "chrf", "ter"),
}
"""Output types, and the metrics of each that come with the harness."""
AGGREGATIONS = ("mean", "median", "nanmean", "perplexity", "weighted_perplexity", "bits_per_byte", "f1", "matthews_corrcoef", "bleu", "chrf", "ter", "brier_score")  # fmt: skip
OF_METRIC = ("metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore")  # fmt: skip
"""Keys of an entry of `metric_list`. (`hf_evaluate` runs NAME/NAME.py of the folder that the command runs in.)"""
OF_FILTER = ("function", "regex_pattern", "group_select", "fallback", "ignore_case", "ignore_punctuation", "regexes_to_ignore", "k")  # fmt: skip
FILTERS = ("take_first", "take_first_k", "majority_vote", "remove_whitespace", "lowercase", "uppercase", "regex", "multi_choice_regex")  # fmt: skip
TEXTS = frozenset(("task", "task_alias", "dataset_path", "training_split", "validation_split", "test_split", "fewshot_split", "output_type", "doc_to_text", "description", "target_delimiter", "fewshot_delimiter", "gen_prefix"))  # fmt: skip
OTHERS = frozenset(("dataset_kwargs", "doc_to_target", "doc_to_choice", "num_fewshot", "repeats", "metric_list", "generation_kwargs", "filter_list", "metadata", "tag"))  # fmt: skip
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
WHY_NOT = {
    "include": "takes in another file",
    "process_docs": "names a function",
    "process_results": "names a function",
    "custom_dataset": "names a function",
    "unsafe_code": "asks for code of the task's data to be run",
    "use_prompt": "fetches prompts",
    "dataset_name": "names a part of a data set of a hub",
}
TRUST = "write it out, or pass --allow-functions for a file that you trust: the harness then reads it alone"


def read_tasks(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The tasks of YAML files, and of folders of them, as plain data for the harness. Raises `ConfigError` with all that is wrong in all of them."""
    problems, tasks = list[Problem](), list[dict[str, Any]]()
    for file in task_files(paths):
        found = _problems_of(file)
        problems += found[1]
        if not found[1]:
            tasks.append(found[0])
    names = [task["task"] for task in tasks]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.append(Problem(where="task", value=name, rule="is the name of several tasks", hint="give each its own"))  # fmt: skip
    if problems:
        raise ConfigError(problems, subject="the tasks")
    return tasks


def task_files(paths: Sequence[Path]) -> list[Path]:
    """Files, and those of folders but parts, whose names begin with `_` as in the harness. Raises `ConfigError`."""
    found, problems = list[Path](), list[Problem]()
    for path in paths:
        files = sorted(p for p in path.glob("*.y*ml") if p.name[0] != "_") if path.is_dir() else [path]
        if not path.exists() or not files:
            rule = "has no .yaml file" if path.exists() else "does not exist"
            problems.append(Problem(where="--tasks", value=str(path), rule=rule, hint="give YAML files of tasks, or a folder of them"))  # fmt: skip
        found += files
    if len(found) > MOST_TASKS:
        problems.append(Problem(where="--tasks", value=len(found), rule=f"are more than {MOST_TASKS} files", hint="give fewer at a time"))  # fmt: skip
    if problems:
        raise ConfigError(problems, subject="the tasks")
    return found


def _problems_of(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    lines: dict[str, int] = {}
    try:
        table = _read_yaml(file, lines)
    except ConfigError as error:
        return {}, list(error.problems)
    return _checked(table, file, lines)


def _read_yaml(file: Path, lines: dict[str, int]) -> dict[str, Any]:
    """A mapping of plain values: no tags, no references; `lines` gets the line of each key. Raises `ConfigError`."""
    import yaml  # comes with the harness

    problems: list[Problem] = []

    class PlainLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                event = self.peek_event()
                where, rule = f"{file}:{event.start_mark.line + 1}", "refers to another place of the file"
                raise ConfigError.of(where, f"*{event.anchor}", rule, "write it out", subject="the tasks")
            return super().compose_node(parent, index)

    def refuse(loader: Any, suffix: str, node: Any) -> None:
        value = node.value if isinstance(node.value, str) else None
        function = node.tag == "!function"
        rule = "names code to be run (!function)" if function else f"has a tag ({node.tag}), which plain data has not"
        if node.tag == "tag:yaml.org,2002:timestamp":
            rule = "is a date"
        problems.append(Problem(where=f"{file}:{node.start_mark.line + 1}", value=value, rule=rule, hint=TRUST if function else "put the value into quotes"))  # fmt: skip

    kept = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "map", "null", "seq", "str"))
    PlainLoader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in kept}
    PlainLoader.add_multi_constructor("", refuse)
    try:
        loader = PlainLoader(read_text(file, most=MOST_BYTES))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            lines.update({key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key.value, str)})
        table: Any = None if node is None else loader.construct_document(node)
    except MalformedError as error:
        problems += error.problems
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        problems.append(Problem(where=str(file), value=None, rule=f"cannot be read ({why})", hint="give a YAML file of UTF-8"))  # fmt: skip
    except RecursionError:
        problems.append(Problem(where=str(file), value=None, rule="is nested too deeply", hint="give a YAML file of a task"))  # fmt: skip
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        problems.append(Problem(where=where, value=None, rule=f"is not YAML: {getattr(error, 'problem', None) or first_line(error)}", hint="repair the line"))  # fmt: skip
    if not problems and not isinstance(table, dict):
        problems.append(
            Problem(where=str(file), value=None, rule="must be keys with values", hint="begin with task: NAME")
        )
    if problems:
        raise ConfigError(problems, subject="the tasks")
    assert isinstance(table, dict)
    return table


def _checked(table: Mapping[Any, Any], file: Path, lines: Mapping[str, int]) -> tuple[dict[str, Any], list[Problem]]:
    """The task with absolute paths of its data, and what is wrong."""
    problems: list[Problem] = []

    def wrong(key: str, value: Any, rule: str, hint: str) -> None:
        line = lines.get(re.split(r"[.\[]", key)[0])
        place = str(file) if line is None else f"{file}:{line}"
        problems.append(Problem(where=f"{place}: {key}", value=value, rule=rule, hint=hint))

    for key, value in table.items():
        if key in WHY_NOT:
            wrong(key, None if value is None else str(value), f"{WHY_NOT[key]}, which a task of a stranger may not", TRUST)  # fmt: skip
        elif key not in TEXTS | OTHERS:
            wrong(str(key), None, "is not taken here", nearest(str(key), TEXTS | OTHERS))
        elif key in TEXTS and not isinstance(value, str):
            wrong(key, value, "must be text", f'write {key}: "..."')
        elif key in ("num_fewshot", "repeats") and not (type(value) is int and 0 <= value <= 1000):
            wrong(key, value, "must be a whole number from 0 to 1000", "leave it out")
    task = dict(table)
    if not isinstance(task.get("task"), str):
        wrong("task", task.get("task"), "must be the name of the task", f"write task: {file.stem}")
    kind = task.setdefault("output_type", "generate_until")
    if not isinstance(kind, str) or kind not in METRICS:
        wrong("output_type", kind, f"must be one of {', '.join(METRICS)}", nearest(str(kind), METRICS))
    if not any(isinstance(task.get(f"{split}_split"), str) for split in ("test", "validation")):
        wrong("test_split", None, "is missing", "write test_split: test, a key of dataset_kwargs.data_files")
    _check_data(task, file, wrong)
    _check_lists(task, str(kind), wrong)
    return task, problems


def _check_data(task: dict[str, Any], file: Path, wrong: Any) -> None:
    if task.get("dataset_path") not in DATA:
        hint = "use json, and name the file as dataset_kwargs: {data_files: {test: FILE.jsonl}}"
        wrong("dataset_path", task.get("dataset_path"), f"must be one of {', '.join(DATA)}: nothing is fetched", hint)
        return
    kwargs = task.get("dataset_kwargs")
    files = kwargs.get("data_files") if isinstance(kwargs, dict) and kwargs.keys() == {"data_files"} else None
    if not isinstance(files, dict) or not all(isinstance(v, str) for v in files.values()) or not files:
        wrong("dataset_kwargs", None, "must be data_files alone, a file for each split", "write dataset_kwargs: {data_files: {test: FILE.jsonl}}")  # fmt: skip
        return
    for split, name in files.items():
        path = Path(name) if Path(name).is_absolute() else file.parent / name
        if not path.is_file():
            wrong(f"dataset_kwargs.data_files.{split}", name, "is no file here", "name one; a path begins in the folder of the YAML file")  # fmt: skip
        files[split] = str(path.resolve())


def _check_lists(task: Mapping[str, Any], kind: str, wrong: Any) -> None:
    for where, entry in _entries(task, "metric_list", wrong):
        name = entry.get("metric")
        if name not in METRICS.get(kind, ()):
            wrong(where, name, f"is no metric of the harness for {kind}", nearest(str(name), METRICS.get(kind, ())))
        if (how := entry.get("aggregation", "mean")) not in AGGREGATIONS:
            wrong(f"{where}.aggregation", how, f"must be one of {', '.join(AGGREGATIONS)}", nearest(str(how), AGGREGATIONS))  # fmt: skip
        _check_keys(entry, where, OF_METRIC, wrong)
    for where, entry in _entries(task, "filter_list", wrong):
        _check_keys(entry, where, ("name", "filter"), wrong)
        for step_where, step in _entries(entry, "filter", wrong, within=where):
            if (name := step.get("function")) not in FILTERS:
                wrong(step_where, name, f"must be one of {', '.join(FILTERS)}", nearest(str(name), FILTERS))
            _check_keys(step, step_where, OF_FILTER, wrong)
    generation = task.get("generation_kwargs")
    if generation is not None:
        for key in generation if isinstance(generation, dict) else ["generation_kwargs"]:
            if key not in GENERATION:
                wrong("generation_kwargs", key, f"must be {', '.join(GENERATION)}", nearest(str(key), GENERATION))
    for key in ("doc_to_target", "doc_to_choice"):
        value = task.get(key)
        if value is not None and not _is_plain(value):
            wrong(key, None, "must be text, a number, or a list of them", "write a template")


def _entries(
    table: Mapping[str, Any], key: str, wrong: Any, *, within: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables of a list, each with its place."""
    place, listed = f"{within}.{key}".lstrip("."), table.get(key)
    if listed is not None and not isinstance(listed, list):
        wrong(place, None, "must be a list", "begin each entry with -")
    for number, entry in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(entry, dict):
            yield f"{place}[{number}]", entry
        else:
            wrong(f"{place}[{number}]", entry, "must be keys with values", "write KEY: VALUE")


def _check_keys(entry: Mapping[Any, Any], where: str, known: Sequence[str], wrong: Any) -> None:
    for key in entry:
        if key not in known:
            wrong(f"{where}.{key}", None, "is not taken here", nearest(str(key), known))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, str | int | float) for v in value)
    return isinstance(value, str | int | float)
