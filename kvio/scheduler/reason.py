"""Why something was decided: said in words only when somebody asks."""

__all__ = ["Reason"]


class Reason:
    """A sentence and the figures in it; `str()` puts them together.

    A decision is made in microseconds and its reason is seldom read, so making one stores a
    template and values and formats nothing. Values are plain data or reasons themselves. Equal
    templates with equal values are equal; `"word" in reason` looks into the text.
    """

    __slots__ = ("template", "values")

    def __init__(self, template: str, *values):
        self.template, self.values = template, values

    def __str__(self) -> str:
        return self.template.format(*self.values)

    def __repr__(self) -> str:
        return f"Reason({str(self)!r})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __contains__(self, text: str) -> bool:
        return text in str(self)

    def __eq__(self, other):
        if not isinstance(other, Reason):
            return NotImplemented
        return (self.template, self.values) == (other.template, other.values)

    def __hash__(self) -> int:
        return hash((self.template, self.values))
