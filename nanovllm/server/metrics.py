"""/metrics: the metrics of the engine and of the API server's process, in Prometheus's format."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from .. import metrics
from ..stats import HELP

LIMIT_NAMES = ("max_num_queued_reqs", "max_num_queued_tokens")
PROCESS_REGISTRY = CollectorRegistry()  # CPU time, memory and open files of this process
ProcessCollector(registry=PROCESS_REGISTRY)


async def show_metrics(request: Request) -> Response:
    """Return all metrics. Those of the engine are read together, between two steps."""
    state = request.app.state.server
    engine_metrics = await state.engine.get_metrics()
    for metric in engine_metrics:
        metric.labels["model_name"] = state.model.name  # the engine's own label may be a path, which is private
    registry = CollectorRegistry()
    registry.register(Collector(engine_metrics + rejections(state.rejections, state.model.name)))
    return Response(generate_latest(registry) + generate_latest(PROCESS_REGISTRY), media_type=CONTENT_TYPE_LATEST)


def rejections(counts: Mapping[str, int], model_name: str) -> list[metrics.Metric]:
    """Return a counter for each limit: the number of requests that it has refused with status 429."""
    name = "vllm:admission_rejections"
    return [metrics.Counter(name, {"model_name": model_name, "reason": limit}, counts[limit]) for limit in LIMIT_NAMES]


class Collector:
    """A prometheus_client collector of metrics that are already known."""

    def __init__(self, known_metrics: Iterable[metrics.Metric]) -> None:
        self._families: dict[str, list[metrics.Metric]] = defaultdict(list)
        for metric in known_metrics:
            self._families[metric.name].append(metric)

    def collect(self) -> list[Metric]:
        """Return one family of metrics for each metric name."""
        return [family_of(name, members) for name, members in self._families.items()]


def family_of(name: str, members: list[metrics.Metric]) -> Metric:
    """Return one family for metrics that differ only in labels. prometheus_client adds _total to a counter's name."""
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    members = [each for metric in members for each in counters_of(metric)]
    help, labels = HELP[name], [*members[0].labels]
    if isinstance(members[0], metrics.Histogram):
        family = HistogramMetricFamily(name, help, labels=labels)
    else:
        family_class = CounterMetricFamily if isinstance(members[0], metrics.Counter) else GaugeMetricFamily
        family = family_class(name, help, labels=labels)
    for metric in members:
        values = [*metric.labels.values()]
        if isinstance(metric, metrics.Histogram) and isinstance(family, HistogramMetricFamily):
            family.add_metric(values, [*metric.buckets.items()], metric.sum)
        elif isinstance(metric, metrics.Counter | metrics.Gauge) and not isinstance(family, HistogramMetricFamily):
            family.add_metric(values, metric.value)
    return family


def counters_of(metric: metrics.Metric) -> list[metrics.Metric]:
    """Return a Vector as counters, one per value, with a label `position`. Return any other metric as it is."""
    if not isinstance(metric, metrics.Vector):
        return [metric]
    values = enumerate(metric.values)
    return [metrics.Counter(metric.name, metric.labels | {"position": str(i)}, value) for i, value in values]
