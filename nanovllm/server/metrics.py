"""/metrics: the engine's numbers and the front's, in Prometheus's format."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from .. import metrics
from ..stats import HELP

LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
PROCESS = CollectorRegistry()  # the front's processor time, memory and open files
ProcessCollector(registry=PROCESS)


async def show_metrics(request: Request) -> Response:
    """Return all numbers. The engine's are read at one moment, between two steps."""
    state = request.app.state.server
    numbers = await state.engine.get_metrics()
    for number in numbers:
        number.labels["model_name"] = state.model.name  # the engine's name for it is a path, which is private
    registry = CollectorRegistry()
    registry.register(Numbers(numbers + rejections(state.rejections, state.model.name)))
    return Response(generate_latest(registry) + generate_latest(PROCESS), media_type=CONTENT_TYPE_LATEST)


def rejections(counts: Mapping[str, int], model_name: str) -> list[metrics.Metric]:
    """Return how often each limit has refused a request with 429."""
    name = "vllm:admission_rejections"
    return [metrics.Counter(name, {"model_name": model_name, "reason": limit}, counts[limit]) for limit in LIMITS]


class Numbers:
    """A prometheus_client collector for existing numbers."""

    def __init__(self, numbers: Iterable[metrics.Metric]) -> None:
        self._families: dict[str, list[metrics.Metric]] = defaultdict(list)
        for number in numbers:
            self._families[number.name].append(number)

    def collect(self) -> list[Metric]:
        """Return a family of metrics for each name."""
        return [family_of(name, numbers) for name, numbers in self._families.items()]


def family_of(name: str, numbers: list[metrics.Metric]) -> Metric:
    """Return the metrics of one name, which differ in labels. prometheus_client adds _total to a counter's name."""
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    numbers = [each for number in numbers for each in counters_of(number)]
    help, labels = HELP[name], [*numbers[0].labels]
    if isinstance(numbers[0], metrics.Histogram):
        family = HistogramMetricFamily(name, help, labels=labels)
    else:
        kind = CounterMetricFamily if isinstance(numbers[0], metrics.Counter) else GaugeMetricFamily
        family = kind(name, help, labels=labels)
    for number in numbers:
        values = [*number.labels.values()]
        if isinstance(number, metrics.Histogram) and isinstance(family, HistogramMetricFamily):
            family.add_metric(values, [*number.buckets.items()], number.sum)
        elif isinstance(number, metrics.Counter | metrics.Gauge) and not isinstance(family, HistogramMetricFamily):
            family.add_metric(values, number.value)
    return family


def counters_of(number: metrics.Metric) -> list[metrics.Metric]:
    """Return a counter with a label `position` for each value of a Vector, and any other number as it is."""
    if not isinstance(number, metrics.Vector):
        return [number]
    values = enumerate(number.values)
    return [metrics.Counter(number.name, number.labels | {"position": str(at)}, value) for at, value in values]
