"""Minimum cuts of graphs whose nodes, not edges, have a capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

#: scipy computes flows in int32; sums of capacities must stay below this.
_INFINITE = 2**30


def minimum_cut[Node](
    capacities: Mapping[Node, float],
    edges: Iterable[tuple[Node, Node]],
    sources: Iterable[Node],
    sinks: Iterable[Node],
) -> set[Node]:
    """The cheapest nodes that lie on every path from a source to a sink.

    Sources and sinks may be among them. Of several minimum cuts it is the one nearest the sinks.

    Args:
        capacities: what each node costs; not negative.
        edges: pairs of nodes, in the direction of the paths.
        sources: where paths start.
        sinks: where paths end.

    Returns:
        The nodes of the cut.

    >>> sorted(minimum_cut({"a": 3, "b": 1, "c": 2}, [("a", "b"), ("b", "c")], "a", "c"))
    ['b']
    >>> sorted(minimum_cut({"a": 3, "b": 3, "c": 0}, [("a", "b"), ("a", "c")], "a", "bc"))
    ['b', 'c']
    """
    index = {node: i for i, node in enumerate(capacities)}
    n = len(index)
    source, sink = 2 * n, 2 * n + 1
    # Node i is the edge from 2i to 2i + 1. Capacities become integers that add up to less than
    # `_INFINITE`.
    total = sum(capacities.values())
    scale = min(1.0, (_INFINITE - 2 * n - 2) / total) if total else 1.0
    tails = [2 * i for i in range(n)]
    heads = [2 * i + 1 for i in range(n)]
    # What costs anything at all must not become free by rounding.
    values = [max(int(c > 0), round(c * scale)) for c in capacities.values()]
    joined = [(2 * index[u] + 1, 2 * index[v]) for u, v in set(edges)]
    joined += [(source, 2 * index[v]) for v in set(sources)]
    joined += [(2 * index[v] + 1, sink) for v in set(sinks)]
    tails += [u for u, _ in joined]
    heads += [v for _, v in joined]
    values += [_INFINITE] * len(joined)
    shape = (2 * n + 2, 2 * n + 2)
    graph = sparse.csr_array((np.array(values, np.int32), (tails, heads)), shape=shape)
    flow = csgraph.maximum_flow(graph, source, sink).flow
    # What still can send something to the sink, found by a search backwards through the residual
    # graph.
    residual = sparse.csr_array(graph - flow)
    residual.eliminate_zeros()
    reached = csgraph.breadth_first_order(
        sparse.csr_array(residual.T), sink, return_predecessors=False
    )
    near_sink = np.zeros(2 * n + 2, bool)
    near_sink[reached] = True
    return {node for node, i in index.items() if near_sink[2 * i + 1] and not near_sink[2 * i]}
