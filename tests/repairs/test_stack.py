"""What mends fairseq costs nothing where it mends nothing, and says nothing."""

import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from fairseq import options, utils
from fairseq.data.legacy import BertDictionary, MaskedLMDictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.nan_detector import NanDetector
from fairseq.sequence_generator import SequenceGenerator
from families import DICTIONARY, FAMILIES
from tiny_transformer import SIZES, build, make_task, sentences, shake
from torch.utils.data import DataLoader

from fairseq_lowrank.repairs import stack

ARCHITECTURES = ["transformer_iwslt_de_en", "lowrank_transformer_iwslt_de_en"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("flags", [[], ["--replace-unk"]], ids=["plain", "replace-unk"])
def test_a_generation_aligns_words_only_where_unknown_ones_are_replaced(arch, flags, monkeypatch):
    task, aligned = make_task(), []
    extract = utils.extract_hard_alignment
    monkeypatch.setattr(utils, "extract_hard_alignment", lambda *args: aligned.append(extract(*args)) or aligned[-1])
    words = ["data", "--path", "x", "--beam", "2", "--max-len-a", "0", "--max-len-b", "5", *flags]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_generation_parser(), words))
    model = build(arch, *SIZES, task=task)
    model.prepare_for_inference_(cfg)
    source = sentences(task.source_dictionary, 5, 2, 4, left_pad=True)
    batch = {"net_input": {"src_tokens": source, "src_lengths": source.ne(task.source_dictionary.pad()).sum(dim=1)}}
    search = task.build_generator([model], cfg.generation)
    found = [hypothesis for best in task.inference_step(search, [model], batch) for hypothesis in best]
    assert len(found) == 3 * 2
    assert aligned == [hypothesis["alignment"] for hypothesis in found if flags]
    for hypothesis in found if flags else ():
        words = [token for token in hypothesis["tokens"] if token != task.target_dictionary.eos()]
        assert [target for _, target in hypothesis["alignment"]] == list(range(len(words)))


@pytest.mark.parametrize("flags", [(), ("--attention", "mha"), ("--attention", "mixhead-b")], ids=str)
def test_a_search_finds_the_same_whatever_beam_the_model_had_before(flags):
    [family] = [family for family in FAMILIES if family.arch == "bart_base"]
    rows = sentences(DICTIONARY, 5, 2, 4, 3, left_pad=True)
    batch = {"net_input": {"src_tokens": rows, "src_lengths": rows.ne(DICTIONARY.pad()).sum(1)}}

    def search(model, beam):
        return SequenceGenerator([model], DICTIONARY, beam_size=beam, max_len_a=0, max_len_b=6)

    def scores(generator, model):
        return [best[0]["positional_scores"].tolist() for best in generator.generate([model], batch)]

    alone = {}
    for beam in (1, 2):
        model = shake(family.build(*flags))
        alone[beam] = scores(search(model, beam), model)
    searches = {beam: search(model, beam) for beam in (1, 2)}
    for beam in (1, 2, 1, 2, 1):
        assert scores(searches[beam], model) == alone[beam]


@pytest.mark.parametrize("flags", [(), ("--attention", "mha")], ids=["stock", "ours"])
def test_a_bart_reads_the_source_of_each_sentence_after_a_search(flags):
    [family] = [family for family in FAMILIES if family.arch == "bart_base"]
    model = shake(family.build(*flags))
    expected = family.output(model)
    search = SequenceGenerator([model], DICTIONARY, beam_size=3, max_len_a=0, max_len_b=6)
    assert family.output(model).equal(expected)  # of three sentences
    rows = sentences(DICTIONARY, 5, 2, 4, left_pad=True)
    search.generate([model], {"net_input": {"src_tokens": rows, "src_lengths": rows.ne(DICTIONARY.pad()).sum(1)}})
    assert family.output(model).equal(expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scalar_noise_needs_no_gpu(arch):
    task = make_task()
    source = sentences(task.source_dictionary, 5, 2, 4, left_pad=True)
    model = build(arch, *SIZES, "--quant-noise-scalar", 0.5, task=task)
    noisy, whole = (model.train(training)(source, None, source)[0] for training in (True, False))
    assert noisy.isfinite().all() and whole.isfinite().all() and not noisy.equal(whole)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_detector_names_the_module_whose_gradient_is_not_finite(arch, caplog):
    task = make_task()
    source = sentences(task.source_dictionary, 5, 2, 4, left_pad=True)
    model = build(arch, *SIZES, task=task).train()
    with caplog.at_level("WARNING"), NanDetector(model):
        (model(source, None, source)[0].sum() * math.nan).backward()
    shape = [*source.shape, len(task.target_dictionary)]
    assert caplog.messages == [
        f"NaN detected in output of decoder.output_projection, shape: torch.Size({shape}), backward"
    ]


@pytest.mark.parametrize("kind", [MaskedLMDictionary, BertDictionary])
def test_a_dictionary_with_a_mask_is_loaded(kind, tmp_path):
    (tmp_path / "dict.txt").write_text("word 3\n")
    loaded = kind.load(str(tmp_path / "dict.txt"))
    assert loaded.symbols == [*kind().symbols, "word"] and loaded.mask() == loaded.index("<mask>")


def test_loaders_say_nothing_of_pinned_memory():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.quieten_warnings()
        assert len(list(DataLoader([1, 2], pin_memory=True))) == 2


def test_a_process_that_ends_before_its_data_has_not_failed():
    command = """
import torch, fairseq_lowrank.plugin
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 10**6
    def __iter__(self):
        while True:
            yield torch.randn(256, 256).sort(0)

readers = [BufferedIterator(size, Batches()) for size in (1, 10**6)]  # one waits for room, one never does
for reader in readers:
    next(reader)
"""
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("batches", "sharded", "base_layers", "trained"),
    [
        (["a", {}], False, 0, ["a"]),
        ([{}, {}], False, 0, [{}]),
        (["a", {}], True, 0, ["a", {}]),
        (["a", {}], False, 1, ["a", {}]),
    ],
)
def test_worker_trains_on_its_own_batches_of_the_last_update(batches, sharded, base_layers, trained):
    trainer = SimpleNamespace(is_fsdp=sharded, cfg=SimpleNamespace(model=SimpleNamespace(base_layers=base_layers)))
    assert stack.count_every_batch(lambda trainer, samples, raise_oom: samples)(trainer, batches) == trained
