"""InfiniBand's arbiter once more, word for word as the rules are written, and nothing faster.

It shares no code with kvio/_ext/softport.c, which knows beforehand where a lane's next turn is.
"""
import copy
import math

HIGH, LOW = "high", "low"


class Arbiter:
    """One port. The tables are lists of (VL, weight)."""

    def __init__(self, high_limit, high, low):
        self.tables, self.high_limit = {HIGH: high, LOW: low}, high_limit
        self.index, self.used = {HIGH: 0, LOW: 0}, {HIGH: 0, LOW: 0}
        self.budget = self.reload()

    def reload(self):
        if self.high_limit == 255:
            return math.inf
        return 1 if self.high_limit == 0 else self.high_limit * 4096

    def pick(self, name, waiting):
        table = self.tables[name]
        for i in range(len(table) + 1 if table else 0):
            e = (self.index[name] + i) % len(table)
            used = self.used[name] if i == 0 else 0
            vl, weight = table[e]
            if weight == 0 or used >= weight:
                continue
            if vl in waiting:
                self.index[name], self.used[name] = e, used
                return e
        return None

    def send(self, waiting):
        """`waiting`: the size of the head packet by VL. The VL that sends, or None."""
        for name in (LOW, HIGH) if self.budget <= 0 else (HIGH, LOW):
            entry = self.pick(name, waiting)
            if entry is None:
                continue
            vl = self.tables[name][entry][0]
            size = max(64, waiting[vl])
            self.used[name] += math.ceil(size / 64)
            self.budget = self.budget - size if name == HIGH else self.reload()
            return vl
        return None

    def peek(self, waiting):
        """What `send` would answer."""
        return copy.deepcopy(self).send(waiting)
