"""Writes down which part of which prompt each forward reads, from what was staged for it."""

from __future__ import annotations

from collections import defaultdict

from engine.controller import Border
from engine.phases import Order, Phase
from tests.oracle_world import World


class ChunkWatch:
    """Set on a world before it runs; looks at every forward as it is launched."""

    def __init__(self, world: World) -> None:
        self.chunks: defaultdict[str, list[int]] = defaultdict(list)
        """Tokens of each prompt, forward by forward, by request."""
        self.orders: list[Order] = []
        """Of each iteration that launched a forward."""
        self.forwards: list[list[str]] = []
        """Of each forward the requests whose prompts it read, in row order."""
        self.num_beside_decode = 0
        """Forwards with decode rows and a part of a prompt that was neither its first nor all of it."""
        self._world = world
        world.on_border = self.look

    def look(self, border: Border) -> None:
        """Called at every border."""
        plan = border.iteration.plan
        if border.side != "before" or border.phase is not Phase.FORWARD or plan is None:
            return
        table, reading = self._world.engine.table, []
        lengths = plan.half.fields["query_len"][plan.shape.num_decode : plan.shape.num_rows].tolist()
        for row, length in zip(plan.table_rows[plan.dims.num_decode :].tolist(), lengths, strict=False):
            request = table.requests[row]
            assert request is not None
            reading.append(request.request_id)
            self.num_beside_decode += bool(self.chunks[request.request_id]) and plan.dims.num_decode > 0
            self.chunks[request.request_id].append(length)
        self.forwards.append(reading)
        self.orders.append(border.iteration.order)
