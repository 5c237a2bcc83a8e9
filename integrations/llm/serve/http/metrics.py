"""What the server has done, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from hostring.integrations.llm.serve.http.service import Service


class Metrics:
    """A Prometheus collector over what the scheduler and the ranks count anyway."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def response(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's `Collector`."""
        scheduler, totals = self._service.scheduler, self._service.scheduler.totals
        running, waiting = scheduler.in_flight
        guesses = scheduler.guessing.totals
        yield GaugeMetricFamily("hostring_up", "1 while requests can be answered.", float(not scheduler.why_not))
        yield GaugeMetricFamily("hostring_texts_running", "Texts that are computed now.", running)
        yield GaugeMetricFamily("hostring_texts_waiting", "Texts that wait for a place.", waiting)
        words = "Tokens that a text got from each of its steps, on average since the start."
        yield GaugeMetricFamily("hostring_tokens_per_step", words, guesses.tokens_per_step)
        for name, words, value in (
            ("steps", "Steps of all ranks.", totals.steps),
            ("prompt_tokens", "Tokens of prompts.", totals.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were in a KV cache.", totals.cached_tokens),
            ("generated_tokens", "Tokens that were generated.", totals.generated_tokens),
            ("guessed_tokens", "Tokens that were guessed, and checked in a step.", guesses.guessed),
            ("right_guesses", "Guessed tokens that were right.", guesses.right),
        ):
            yield CounterMetricFamily(f"hostring_{name}", words, value)
        ended = CounterMetricFamily("hostring_texts", "Texts by how they ended.", labels=["ended"])
        for how, count in dict(totals.ended).items():
            ended.add_metric([how], count)
        yield ended
        yield from self._of_ranks()

    def _of_ranks(self) -> Iterator[Metric]:
        snapshots = self._service.cluster.snapshots
        seconds = CounterMetricFamily("hostring_rank_seconds", "What a rank spent its time on.", labels=["rank", "on"])
        sent = CounterMetricFamily("hostring_rank_sent_bytes", "Payload that a rank sent.", labels=["rank"])
        held = GaugeMetricFamily("hostring_rank_held_bytes", "Memory that a rank holds.", labels=["rank", "of"])
        for report in snapshots[-1].reports if snapshots else ():
            rank = str(report["rank"])
            for phase, value in report["seconds"].items():
                seconds.add_metric([rank, phase], value)
            sent.add_metric([rank], sum(report["sent"].values()))
            held.add_metric([rank, "weights"], report["bytes_held"])
            held.add_metric([rank, "kv"], report["kv_bytes"])
        yield from (seconds, sent, held)
