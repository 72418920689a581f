"""What one worker process holds over its life: connections, its identity, loaded models, latents in memory."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy

from chorus_batch.jobs import fitness, registry
from chorus_batch.jobs.auxiliary import auxiliaries
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.jobs.checksums import combine
from chorus_batch.jobs.claims import DomainRecord
from chorus_batch.jobs.database import connect
from chorus_batch.jobs.errors import WeightsRejected
from chorus_batch.jobs.neighbours import NeighbourSearch
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore
from chorus_batch.workers.heartbeat import Heartbeat

# torch and the engine are imported inside functions: Celery's parent process imports this module and must stay light.
if TYPE_CHECKING:
    import torch

    from chorus_batch.chorus.differ import Differ
    from chorus_batch.chorus.engine import Engine
    from chorus_batch.chorus.evidence import Evidence
    from chorus_batch.chorus.policy import Policy, ReusePolicy
    from chorus_batch.chorus.segment import Segmenter
    from chorus_batch.workers.decoder import Decoder
    from chorus_batch.workers.texts import Texts

log = logging.getLogger(__name__)

HELD_BYTES = 512 << 20  # latents of sources kept in memory, so that their followers fetch nothing


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and how each policy reuses its latents."""

    engine: Engine
    policies: Mapping[str, ReusePolicy]
    decoder: Decoder
    texts: Texts | None  # None: the engine encodes by itself


@dataclass(frozen=True)
class HeldSource:
    """A source's {k: x[k]} and its evidence, as they are stored: whoever fetched them would have the same."""

    latents: Mapping[int, torch.Tensor]
    evidence: Evidence | None

    @property
    def size(self) -> int:
        """Bytes of the latents."""
        return sum(x.numel() * x.element_size() for x in self.latents.values())


class HeldSources:
    """The sources that this process made or fetched last, by the source's job."""

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._sources: OrderedDict[int, tuple[str, HeldSource]] = OrderedDict()

    def ids(self) -> list[int]:
        """The sources' jobs, for a claim to prefer their followers."""
        return list(self._sources)

    def add(self, job_id: int, sha256: str, source: HeldSource) -> None:
        """Keep a source; the longest unused ones go when memory is up."""
        self.drop(job_id)
        self._sources[job_id] = (sha256, source)
        self._bytes += source.size
        while self._bytes > self._limit and len(self._sources) > 1:
            self.drop(next(iter(self._sources)))

    def get(self, job_id: int, sha256: str) -> HeldSource | None:
        """The source if it is that of the object with this checksum."""
        found = self._sources.get(job_id)
        if found is None or found[0] != sha256:
            return None
        self._sources.move_to_end(job_id)
        return found[1]

    def drop(self, job_id: int) -> None:
        """Forget a source."""
        found = self._sources.pop(job_id, None)
        if found is not None:
            self._bytes -= found[1].size


class Runtime:
    """One process on one device. Cheap to make: the database is met by `start`, models load when first needed."""

    def __init__(self, settings: Settings, slot: str | None = None) -> None:
        """`slot`: see Heartbeat; left out, it is one that nobody was ever in."""
        self.settings = settings
        self._slot = slot or uuid.uuid4().hex
        self.stopping = threading.Event()
        self.database: sqlalchemy.Engine = connect(settings.database_url, plan_once=True)
        self.store = ObjectStore.from_settings(settings)
        self.search = NeighbourSearch(settings.exact_search_rows)
        self.held = HeldSources()
        self.heartbeat: Heartbeat | None = None
        self.unfit: Mapping[str, str] = {}  # models whose jobs aren't claimed, and why
        self.lacking = ""  # why regions come from the evidence, where another segmenter was asked for
        self._models: dict[str, LoadedModel] = {}
        self._segmenter: Segmenter | None = None
        self._making = threading.Lock()
        self._loading: threading.Thread | None = None

    @property
    def worker_id(self) -> str:
        """This process' identity now."""
        assert self.heartbeat is not None
        return self.heartbeat.worker_id

    def start(self) -> None:
        """Enter the list of workers. May be called again."""
        if self.heartbeat is None:
            self.unfit = fitness.unfit_models(self.settings)
            for name, why in self.unfit.items():
                log.warning("jobs of the model %s aren't claimed: %s", name, why)
            self.store.ensure_bucket()
            heartbeat = Heartbeat(
                self.database,
                slot=self._slot,
                device=chosen_device(self.settings),
                interval=self.settings.heartbeat_interval,
            )
            heartbeat.enter()
            self.heartbeat = heartbeat

    def close(self) -> None:
        """Sign off."""
        if self.heartbeat is not None:
            self.heartbeat.leave()
        self.database.dispose()

    def preload(self) -> None:
        """Import what a job needs while there is none: the libraries take many seconds, the first video shouldn't."""

        def load() -> None:
            import chorus_batch.workers.pipeline  # noqa: F401
            from chorus_batch.chorus.tiny import model  # noqa: F401

            self.segmenter()

        self._loading = threading.Thread(target=load, name="preload", daemon=True)
        self._loading.start()

    def preloaded(self) -> None:
        """Wait for `preload`. Two threads that import libraries which import each other may see halves of them."""
        if self._loading is not None:
            self._loading.join()

    def model(self, domain: DomainRecord) -> LoadedModel:
        """The model of a domain, loaded once; a model with weights of its own takes the others' place.

        Raises WeightsRejected if its weights aren't those that were planned with, EngineError if they can't be used.
        """
        loaded = self._models.get(domain.model)
        if loaded is None or loaded.engine.fingerprint != domain.fingerprint:
            loaded = self._models[domain.model] = self._load(domain)
        return loaded

    def segmenter(self) -> Segmenter:
        """What finds regions, one for all models. Where its libraries or folders aren't there it is the evidence.

        A region found less well is better than a job that fails; it is told once.
        """
        from chorus_batch.chorus.errors import WeightsError
        from chorus_batch.chorus.segment import EvidenceSegmenter

        with self._making:
            if self._segmenter is None:
                try:
                    self._segmenter = make_segmenter(self.settings, chosen_device(self.settings), self.store)
                except (ImportError, OSError, WeightsError) as error:
                    hint = error.hint if isinstance(error, WeightsError) else "install the extra: chorus-batch[segment]"
                    self.lacking = f"no segmenter, regions come from the evidence: {error} ({hint})"
                    log.warning("%s", self.lacking)
                    self._segmenter = EvidenceSegmenter()
            return self._segmenter

    def _load(self, domain: DomainRecord) -> LoadedModel:
        from chorus_batch.workers.decoder import Decoder
        from chorus_batch.workers.models import load_engine, load_texts

        card = load_card(domain.model, self.settings.models_folder)
        if card.fingerprint != domain.fingerprint:
            # Before anything is loaded.
            raise WeightsRejected(
                f"the weights of {domain.model!r} here are not those that the job was planned with",
                hint="submit the batch again, or give this worker the same version of the weights",
            )
        if card.weights is not None:
            # A device seldom has room for two.
            self._models.clear()
        device = chosen_device(self.settings)
        engine = load_engine(card, self.settings, device)
        texts = load_texts(card, engine, self.store, device)
        decoder = Decoder(engine, card, device, auxiliaries(self.settings))
        return LoadedModel(engine, self.policies(card), decoder, texts)

    def policies(self, card: ModelCard) -> dict[str, ReusePolicy]:
        """How a model's latents are reused, by policy; nothing is loaded yet. Raises WeightsError."""
        from chorus_batch.chorus.policy import Policy

        quick = lexical_differ(card)
        differ = make_differ(self.settings, quick, chosen_device(self.settings))
        segmenter = self.segmenter()
        return {policy.value: reuse_policy(card, policy, differ, quick, segmenter) for policy in Policy}


def chosen_device(settings: Settings) -> str:
    """The device that the settings name, as torch calls it."""
    if settings.device != "auto":
        return settings.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def lexical_differ(card: ModelCard) -> Differ:
    """Compares by words, with the model's own synonyms."""
    from chorus_batch.chorus.differ import LexicalDiffer, LexicalSettings

    return LexicalDiffer(LexicalSettings(synonyms=card.synonyms))


def make_differ(settings: Settings, lexical: Differ, device: str) -> Differ:
    """The differ that the settings name: the lexical one, or llm:FOLDER, which falls back on it.

    What a model answers is kept in the data folder, by the checksums of its files. Raises WeightsError.
    """
    folder = settings.differ_folder
    if folder is None:
        return lexical
    from chorus_batch.chorus.answers import AnswerFile
    from chorus_batch.chorus.llm_differ import LlmDiffer, LocalModel

    model = LocalModel(folder, device=device)
    files = {path.name: path for path in folder.iterdir() if path.is_file()}
    fingerprint = combine(registry.memory(settings).of(files))
    return LlmDiffer(model, lexical, AnswerFile(settings.data_dir / "answers.jsonl", fingerprint))


def make_segmenter(settings: Settings, device: str, store: ObjectStore) -> Segmenter:
    """The segmenter that the settings name: the evidence's, or grounded:FOLDER,FOLDER. Raises WeightsError.

    What models find is kept in the object store, by the checksums of their files; the evidence is read in no time.
    """
    folders = settings.segmenter_folders
    if not folders:
        from chorus_batch.chorus.segment import EvidenceSegmenter

        return EvidenceSegmenter()
    from chorus_batch.chorus.grounded import VERSION, GroundedSegmenter
    from chorus_batch.workers.masks import StoredMasks

    segmenter = GroundedSegmenter(*folders, device)
    files = {
        f"{number}/{path.name}": path
        for number, folder in enumerate(folders)
        for path in folder.iterdir()
        if path.is_file()
    }
    return StoredMasks(segmenter, store, combine({**registry.memory(settings).of(files), "": VERSION}))


def reuse_policy(card: ModelCard, policy: Policy, differ: Differ, quick: Differ, segmenter: Segmenter) -> ReusePolicy:
    """How a model's latents are reused under a policy, by its card; `quick` ranks sources."""
    from chorus_batch.chorus.gains import Gains
    from chorus_batch.chorus.policy import ReusePolicy
    from chorus_batch.chorus.regions import RegionSettings
    from chorus_batch.chorus.stages import Boundaries

    # No tau above 1: a card without boundaries reuses nothing, whatever its gains.
    tau = min(card.tau, 0.99)
    return ReusePolicy(
        policy,
        Boundaries.parse(card.boundaries, card.defaults.shift, card.kinds),
        Gains(**card.gains, tau=tau),
        RegionSettings(**card.regions),  # type: ignore[arg-type]  # the card checked which are whole
        differ,
        segmenter,
        {kind: Gains(**gains, tau=tau) for kind, gains in card.kind_gains.items()},
        quick,
    )
