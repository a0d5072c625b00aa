"""/metrics: the engine's numbers, and those of the front, as Prometheus reads them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ..engine import stats as metrics
from ..engine.stats import HELP

LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
PROCESS = CollectorRegistry()  # of the front: its processor time, memory and open files
ProcessCollector(registry=PROCESS)


async def show_metrics(request: Request) -> Response:
    """Asked between two steps of the engine: what is told belongs to one moment."""
    state = request.app.state.server
    numbers = await state.engine.ask("metrics")
    for number in numbers:
        number.labels["model_name"] = state.model.name  # the engine calls it by its folder, which is nobody's business
    numbers += rejections(state.rejections, state.model.name)
    registry = CollectorRegistry()
    registry.register(Numbers(numbers))
    return Response(generate_latest(registry) + generate_latest(PROCESS), media_type=CONTENT_TYPE_LATEST)


def rejections(counts: Mapping[str, int], model_name: str) -> list[metrics.Metric]:
    """How often each limit of what may wait has refused a request."""
    name = "vllm:admission_rejections"
    return [metrics.Counter(name, {"model_name": model_name, "reason": limit}, counts[limit]) for limit in LIMITS]


class Numbers:
    """A collector of numbers that are there already."""

    def __init__(self, numbers: Iterable[metrics.Metric]) -> None:
        self._families: dict[str, list[metrics.Metric]] = defaultdict(list)
        for number in numbers:
            self._families[number.name].append(number)

    def collect(self) -> Iterable[Metric]:
        return [MAKERS[type(numbers[0])](name, numbers) for name, numbers in self._families.items()]


def counters(name: str, numbers: list[metrics.Counter]) -> Metric:
    """prometheus_client puts _total behind the name, as it does for vLLM."""
    family = CounterMetricFamily(name, HELP[name], labels=[*numbers[0].labels])
    for number in numbers:
        family.add_metric([*number.labels.values()], number.value)
    return family


def gauges(name: str, numbers: list[metrics.Gauge]) -> Metric:
    family = GaugeMetricFamily(name, HELP[name], labels=[*numbers[0].labels])
    for number in numbers:
        family.add_metric([*number.labels.values()], number.value)
    return family


def histograms(name: str, numbers: list[metrics.Histogram]) -> Metric:
    family = HistogramMetricFamily(name, HELP[name], labels=[*numbers[0].labels])
    for number in numbers:
        family.add_metric([*number.labels.values()], [*number.buckets.items()], number.sum)
    return family


MAKERS: dict[type, Callable[[str, list], Metric]] = {
    metrics.Counter: counters,
    metrics.Gauge: gauges,
    metrics.Histogram: histograms,
}
