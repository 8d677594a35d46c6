"""How large: the scheduler's thresholds, the working set of agents, the buffers of a node."""
from kvio.analysis.links import positive

__all__ = ["alpha_tokens", "beta_tokens", "buffer_bytes", "working_set_bytes"]


def alpha_tokens(snic_bytes_per_s: float, bytes_per_token: float, seconds: float = 3.0) -> int:
    """The scheduler's alpha: tokens that a storage NIC reads in `seconds`. Source: DualPath §6."""
    return int(positive("seconds", seconds) * positive("snic_bytes_per_s", snic_bytes_per_s)
               / positive("bytes_per_token", bytes_per_token))


def beta_tokens(tokens_per_s: float, seconds: float = 5.0) -> int:
    """The scheduler's beta: tokens that one GPU processes in `seconds`, where hits count as
    processed once they are attended to. Source: DualPath §6."""
    return int(positive("seconds", seconds) * positive("tokens_per_s", tokens_per_s))


def working_set_bytes(agents_per_s: float, session_s: float, total_tokens: float,
                      bytes_per_token: float) -> float:
    """KV of all sessions under way: arrivals x their mean time (Little's law), each with half of
    its final context on average. Source: DualPath §8.2."""
    return positive("agents_per_s", agents_per_s) * positive("session_s", session_s) \
        * positive("total_tokens", total_tokens) / 2 * positive("bytes_per_token", bytes_per_token)


def buffer_bytes(read_bytes_per_s: float, residency_s: float,
                 largest_request_bytes: float = 0) -> float:
    """DRAM buffer of a node that keeps its storage NIC busy: what is read during the time that a
    request stays in the buffer (Little's law), and room for the largest request to enter, since
    its blocks are taken at once."""
    return positive("read_bytes_per_s", read_bytes_per_s) * positive("residency_s", residency_s) \
        + largest_request_bytes
