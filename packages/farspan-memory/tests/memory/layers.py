"""A small training step with marks, as `farspan memory trace` writes them."""

from farspan_memory.trace import Event, FreeEvent, Malloc, Mark, Trace


def step(layers: int, odd: int | None = None) -> Trace:
    """x_l+1 is born in layer l and dies in its backward; dx passes down; three locals a pass. The
    `odd` layer has one local more."""
    events: list[Event] = [Mark("step 0"), Malloc(0, 64)]
    for layer in range(layers):
        events.append(Mark(f"layer {layer} forward"))
        events += _locals(1000 + 10 * layer, (96, 32, 16) + (8,) * (layer == odd))
        events.append(Malloc(layer + 1, 64))
    events += [Mark("head"), Malloc(500, 200), Malloc(600 + layers, 64), FreeEvent(500)]
    for layer in reversed(range(layers)):
        events.append(Mark(f"layer {layer} backward"))
        events += _locals(3000 + 10 * layer, (128, 64, 48))
        events += [Malloc(600 + layer, 64), FreeEvent(601 + layer), FreeEvent(layer + 1)]
    events += [Mark("optimizer"), Malloc(9000, 10), FreeEvent(600), FreeEvent(9000), FreeEvent(0)]
    return Trace(tuple(events), "step")


def _locals(first: int, sizes: tuple[int, ...]) -> list[Event]:
    """Each is alive with the next."""
    events: list[Event] = [Malloc(first, sizes[0])]
    for number, size in enumerate(sizes[1:], first + 1):
        events += [Malloc(number, size), FreeEvent(number - 1)]
    return [*events, FreeEvent(first + len(sizes) - 1)]
