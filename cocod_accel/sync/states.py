"""What ``state_dict()`` returns, and how states of earlier releases are read."""

from __future__ import annotations

from typing import Any

VERSION = 4
_KEYS = ("algorithm", "attempts", "rounds", "round_start", "options", "method", "averages", "traffic", "nodes")
#: Version 3, the one before averages were kept part by part.
_KEYS_3 = (
    "algorithm", "attempts", "rounds", "round_start", "in_flight", "payload", "anchor", "drift", "traffic", "nodes",
)  # fmt: skip


def readable(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` as this release writes it; raises if it is not a state of any release that can be read."""
    version = state.get("version")
    if version not in (3, VERSION):
        raise ValueError(f"state version {version!r} is not {VERSION} or 3; save it with this release")
    missing = [key for key in (_KEYS if version == VERSION else _KEYS_3) if key not in state]
    if missing:
        raise ValueError(f"the state is missing {missing}; pass what state_dict() returned")
    return state if version == VERSION else _from_3(state)


def without_averages(state: dict[str, Any], nodes: list[list[int]]) -> dict[str, Any]:
    """For other workers than those that saved: they begin a round here, and the next mean is sent in full."""
    method = state["method"]
    # What a server held is everybody's.
    kept = {"server": method["server"]} if isinstance(method, dict) and method.get("server") is not None else None
    return {**readable(state), "method": kept, "averages": None, "nodes": nodes, "round_start": state["attempts"]}


def _from_3(state: dict[str, Any]) -> dict[str, Any]:
    kept = {key: state[key] for key in ("algorithm", "attempts", "rounds", "round_start", "traffic", "nodes")}
    anchor = state["anchor"] or {"pull_back": 0.0, "anchor": None}
    if anchor["pull_back"]:
        raise ValueError(
            f"the state was saved with pull_back={anchor['pull_back']:g}, which discarded progress and was removed; "
            "start a new run, e.g. with own_share=0.5"
        )
    followed = anchor["anchor"] or {"momentum": 0.0, "points": None, "velocities": []}
    payload = state["payload"] or {"name": "fp32"}
    in_flight = state["in_flight"]
    is_delayed = state["algorithm"] == "pipe"  # its gradients were kept in the same place
    is_cut = not is_delayed and isinstance(in_flight, list) and bool(in_flight) and isinstance(in_flight[0], dict)
    pieces = in_flight if is_cut else [{"in_flight": None if is_delayed else in_flight, "drift": state["drift"]}]
    parts = []
    for piece in pieces:
        z = followed["points"] if followed["points"] is not None else payload.get("centres") or None
        parts.append(
            {
                "number": 0,
                "in_flight": piece["in_flight"],
                "is_coded": payload.get("is_in_flight", False),
                "drift": piece["drift"],
                "point": None if z is None else {"z": z, "velocity": followed["velocities"]},
                "residuals": payload.get("residuals", []),
                "owned_residuals": payload.get("owned_residuals", []),
                "left_out": None,
            }
        )
    options = {
        "payload": payload["name"],
        "fragments": len(parts),
        "own_share": 1.0,
        "outer": [1.0, followed["momentum"], False],
    }
    averages = {"parts": parts}
    return {
        **kept,
        "version": VERSION,
        "options": options,
        "method": in_flight if is_delayed else None,
        "averages": averages,
    }
