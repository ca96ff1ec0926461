"""Reports by mistake, for the tools that sum them up: `run --sanitize` and the pytest plugin.

A finding is a report as a dictionary of plain values, which pytest-xdist can pass between
processes.
"""


def key(report):
    """Equal for reports of one mistake. A report without a place is a mistake of its own."""
    return repr(report.mistake) if report.place else report.details()


def finding(report):
    sides = (report.later, report.earlier)
    return {
        "mistake": key(report),
        "title": report.title,
        "text": str(report),
        "details": report.details(),
        "summary": report.summary(),
        "place": report.place and tuple(report.place),
        "operators": [side.operator for side in sides if side.operator != "allocation"],
        "process": report.process,
    }


def by_mistake(findings):
    """Lists of the findings of one mistake each, in the order of their first."""
    groups = {}
    for found in findings:
        groups.setdefault(found["mistake"], []).append(found)
    return list(groups.values())


def line(group, where=()):
    """A mistake in one line: both places and what is missing; how often, by which operators, and
    where."""
    names = (name for found in group for name in found["operators"])
    operators = dict.fromkeys(map(short_operator, names))
    processes = dict.fromkeys(found["process"] for found in group if found["process"])
    often = f"{len(group)} reports, by " if len(group) > 1 else "by "
    parts = [often + _some(operators, 4, ", "), *map(_in, (processes, where))]
    return f"{group[0]['summary']} ({'; '.join(filter(None, parts))})"


def short_operator(operator):
    """An operator's name without its library and overload."""
    name = operator.removeprefix("aten::")
    return name if name == operator else name.partition(".")[0]


def _in(names):
    return f"in {_some(names, 1, ', ')}" if names else ""


def _some(names, most, separator):
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
