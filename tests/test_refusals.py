"""Bad input ends every command in one line and code 2, and nothing is left half-written.

A case is a command line and the words that its line must hold. It runs in a folder with ``mt`` and ``lm`` (binarised data),
``mixhead.pt`` and ``lm.pt`` (checkpoints), texts and damaged files; ``out`` is where it would write.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("fairseq") is None:  # the commands import it, not this process
    pytest.skip("fairseq is not installed", allow_module_level=True)

from fairseq_lowrank.attention import build_attention

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKLY = "--optimizer adam --max-tokens 500 --max-update 2 --cpu --num-workers 0"
DECODER = (
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
    f"{QUICKLY} --save-dir out"
)
ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
TRANSLATION = f"fairseq-train mt --arch lowrank_transformer {ENCODER} {DECODER}"
STOCK = f"fairseq-train mt --arch transformer {ENCODER} {DECODER}"
LANGUAGE_MODEL = (
    f"fairseq-train lm --task language_modeling --arch lowrank_transformer_lm --tokens-per-sample 16 {DECODER}"
)
ALIGNED = "--load-alignments --criterion label_smoothed_cross_entropy_with_alignment"
EVALUATED = "--cpu --num-workers 0 --results-path out"
GENERATE = f"fairseq-generate mt {EVALUATED}"
INTERACTIVE = f"fairseq-interactive mt {EVALUATED}"
EVAL_LM = f"fairseq-eval-lm lm {EVALUATED}"
VALIDATE = f"fairseq-validate mt {EVALUATED}"
PREPROCESS = "fairseq-preprocess -s de -t en --destdir out"
OURS = "fairseq-lowrank"
EXPERIMENTS = "experiments"

CASES: dict[str, list[tuple[str, str]]] = {
    TRANSLATION: [
        ("--attention-dropout 1.0", "--attention-dropout 1: expected a number from 0 to below 1"),
        ("--attention-dropout -0.5", "--attention-dropout -0.5: expected a number from 0"),
        ("--attention-dropout nan", "--attention-dropout nan: expected a number"),
        ("--activation-dropout 2", "--activation-dropout 2: expected a number"),
        ("--dropout -1", "--dropout -1: expected a number from 0"),
        ("--dropout 1", "--dropout 1: expected a number from 0"),
        ("--encoder-layerdrop 1", "--encoder-layerdrop 1: expected a number"),
        ("--decoder-layerdrop -0.1", "--decoder-layerdrop -0.1: expected a number"),
        ("--encoder-layers 0", "--encoder-layers 0: expected a number >= 1"),
        ("--decoder-layers -2", "--decoder-layers -2: expected a number >= 1"),
        ("--encoder-embed-dim 0", "--encoder-embed-dim 0: expected a number >= 1"),
        ("--decoder-ffn-embed-dim 0", "--decoder-ffn-embed-dim 0: expected a number >= 1"),
        ("--encoder-attention-heads 0", "--encoder-attention-heads 0: expected a number >= 1"),
        ("--encoder-attention-heads 3", "embed_dim=16 is not divisible by num_heads=3"),
        ("--max-source-positions 0", "--max-source-positions 0: expected a number >= 1"),
        ("--max-target-positions -1", "--max-target-positions -1: expected a number >= 1"),
        ("--encoder-layers-to-keep 0,5", "--encoder-layers-to-keep 0,5: expected different layers from 0 to 0"),
        ("--decoder-layers 2 --decoder-layers-to-keep 1,1", "--decoder-layers-to-keep 1,1: expected different layers"),
        ("--encoder-layers-to-keep 0,x", "--encoder-layers-to-keep"),
        ("--adaptive-softmax-cutoff 100,50", "--adaptive-softmax-cutoff 100,50: expected rising numbers"),
        ("--adaptive-softmax-cutoff 0,5", "--adaptive-softmax-cutoff 0,5: expected rising numbers"),
        ("--attention nope", "argument --attention: invalid choice: 'nope'"),
        ("--attention fixedhead", "'fixedhead' needs a head size"),
        ("--attention el --head-dim 4", "'el' cuts the hidden states into heads"),
        ("--head-dim 0", "head_dim=0: expected a positive integer"),
        ("--head-dim -4", "head_dim=-4: expected a positive integer"),
        ("--head-dim 8.5", "argument --head-dim: invalid int value: '8.5'"),
        ("--head-dim 100000000000", "--head-dim 100000000000: expected 1 to 65536"),
        ("--head-mixing nope", "argument --head-mixing: invalid choice"),
        ("--attention-projection nope", "argument --attention-projection: invalid choice"),
        ("--attention-activation nope", "argument --attention-activation: invalid choice"),
        ("--attention-backend nope", "argument --attention-backend: invalid choice"),
        ("--attention-backend sdpa --attention talking-heads", "backend='sdpa' cannot compute head mixing of scores"),
        ("--attention mixhead-b --restore-file stock.pt", "add --reset-optimizer"),
        ("--attention mixhead-a --restore-file mixhead.pt", "--attention mixhead-b"),
        ("--attention mixhead-a --finetune-from-model mixhead.pt", "--attention mixhead-b"),
        ("--attention-sites nowhere", "--attention-sites 'nowhere': expected a comma list"),
        ("--attention-sites ,", "--attention-sites ',': expected a comma list"),
        ("--no-cross-attention --attention-sites cross", "--attention-sites cross: this model has no such attention"),
        ("--mixing-lr-scale 5", "--mixing-lr-scale 5: head mixing none learns nothing"),
        ("--mixing-lr-scale 5 --attention avghead", "--mixing-lr-scale 5: head mixing average learns nothing"),
        ("--mixing-lr-scale inf --attention mixhead-b", "--mixing-lr-scale inf: expected a number >= 0"),
        ("--mixing-lr-scale nan --attention mixhead-b", "--mixing-lr-scale nan: expected a number >= 0"),
        ("--mixing-lr-scale -1 --attention mixhead-b", "--mixing-lr-scale -1: expected a number >= 0"),
        ("--mixing-orthogonality -1", "--mixing-orthogonality -1: expected a number >= 0"),
        ("--mixing-orthogonality 1", "--mixing-orthogonality 1: the model has no head mixing that learns"),
        ("--row-space-penalty inf", "--row-space-penalty inf: expected a number >= 0"),
        ("--column-space-penalty x", "argument --column-space-penalty: invalid float value"),
        ("--quant-noise-pq 0.1 --quant-noise-pq-block-size 3", "multiple of block sizes"),
        (f"{ALIGNED} --attention mixhead-b", "--load-alignments: the loss takes the weights of cross attention for"),
        (
            f"{ALIGNED} --attention gain",
            "those of head mixing diagonal are not; take --attention-sites encoder,decoder",
        ),
        ("--encoder-xformers-att-config {}", "--encoder-xformers-att-config '{}' needs the package xformers"),
        ("--nope", "unrecognized arguments: --nope"),
    ],
    STOCK: [
        ("--mixing-orthogonality 1", "has no attention of this package"),
        ("--lr abc", "argument --lr"),
        ("--lr -1", "--lr -1: expected a number >= 0"),
        ("--max-tokens 0", "--max-tokens 0: expected a number >= 1"),
        ("--max-tokens -3", "--max-tokens -3: expected a number >= 1"),
        ("--max-tokens 2", "no sentence or block of the data is left"),
        ("--batch-size 0", "--batch-size 0: expected a number >= 1"),
        ("--batch-size-valid 0", "--batch-size-valid 0: expected a number >= 1"),
        ("--batch-size-valid some", "--batch-size-valid some: expected a number >= 1"),
        ("--update-freq 0", "--update-freq 0: expected a number >= 1"),
        ("--log-interval 0", "--log-interval 0: expected a number >= 1"),
        ("--save-interval 0", "--save-interval 0: expected a number >= 1"),
        ("--num-workers -1", "--num-workers -1: expected a number >= 0"),
        ("--distributed-world-size 0", "--distributed-world-size 0: expected a number >= 1"),
        ("--max-update abc", "argument --max-update: invalid int value"),
        ("--seed x", "argument --seed: invalid int value"),
        ("--optimizer nope", "argument --optimizer: invalid choice"),
        ("--criterion nope", "argument --criterion: invalid choice"),
        ("--lr-scheduler polynomial_decay", "lr_scheduler.total_num_update"),
        ("--adam-betas 0.9", "TypeError"),
        ("--train-subset nope", "Dataset not found: nope (mt)"),
        ("--valid-subset nope", "Dataset not found: nope (mt)"),
        ("-s xx -t yy", "mt/dict.xx.txt: No such file or directory"),
        ("--share-all-embeddings", "--share-all-embeddings requires a joined dictionary"),
        ("--encoder-embed-path nope.txt", "nope.txt: No such file or directory"),
        ("--finetune-from-model nope.pt", "nope.pt"),
        ("--finetune-from-model words.de", "words.de cannot be read as a checkpoint"),
        ("--restore-file mixhead.pt", "only the checkpoint has encoder.layers.0.self_attn.mixing"),
        ("--restore-file lm.pt", ["lm.pt", "The checkpoint is of another model"][1]),
        ("--restore-file empty.txt", "empty.txt cannot be read as a checkpoint"),
        ("--eval-bleu --eval-bleu-args nope", "Expecting value"),
        ("--max-source-positions 2", "no sentence or block of the data is left"),
        ("--fp16", "--fp16 on the CPU needs"),
        ("--amp", "--amp needs a GPU"),
        ("--fp16 --tpu", "Cannot combine --fp16 and --tpu"),
        ("--ddp-backend fully_sharded", "needs the package fairscale"),
        ("--distributed-world-size 2", "world size is 2 but have 0 available devices"),
        ("--save-dir words.de", "Not a directory"),
        ("--restore-file nope.pt", "--restore-file nope.pt: expected a checkpoint, and there is no such file"),
        ("--restore-file stock.pt --optimizer nag", "--reset-optimizer"),
        ("--restore-file flipped-mixhead.pt", "flipped-mixhead.pt cannot be read as a checkpoint"),
        ("--finetune-from-model mixhead.pt", "only the checkpoint has encoder.layers.0.self_attn.mixing"),
        ("--finetune-from-model flipped-mixhead.pt", "flipped-mixhead.pt cannot be read as a checkpoint"),
        ("--best-checkpoint-metric nope", "--best-checkpoint-metric nope: expected one of loss, ppl, num_updates"),
        (
            "--best-checkpoint-metric nll_loss",
            "--best-checkpoint-metric nll_loss: expected one of loss, ppl, num_updates",
        ),
        ("--best-checkpoint-metric bleu", "(bleu needs --eval-bleu)"),
    ],
    LANGUAGE_MODEL: [
        ("--tokens-per-sample -5", "--tokens-per-sample -5: expected a number >= 1"),
        ("--tokens-per-sample 0", "--tokens-per-sample 0: expected a number >= 1"),
        ("--max-target-positions 8", "--max-target-positions 8: expected a number >= 16, the --tokens-per-sample"),
        (
            "--attention-score synthesizer-dense --synthesizer-heads 0",
            "synthesizer_heads=0: expected a positive integer",
        ),
        (
            "--attention-score synthesizer-dense --synthesizer-heads 3",
            "synthesizer_heads=3: expected a divisor of num_",
        ),
        ("--sample-break-mode nope", "argument --sample-break-mode: invalid choice"),
        ("--adaptive-softmax-cutoff 100,50", "--adaptive-softmax-cutoff 100,50: expected rising numbers"),
        ("--adaptive-softmax-cutoff a,b", "'a,b' is not evaluated"),
        ("--adaptive-softmax-cutoff 100,500", "cutoff larger than vocab size"),
        ("--adaptive-input", "--adaptive-input needs --adaptive-input-cutoff"),
        ("--adaptive-input --adaptive-input-cutoff 5,3", "--adaptive-input-cutoff 5,3: expected rising numbers"),
        ("--adaptive-softmax-cutoff 5,9 --adaptive-softmax-factor 0", "--adaptive-softmax-factor 0: expected a number"),
        ("--tie-adaptive-weights --adaptive-softmax-cutoff 5,9", "--tie-adaptive-weights needs --adaptive-input"),
        ("--criterion adaptive_loss", "--ddp-backend=legacy_ddp"),
        ("--embed-rank 0", "--embed-rank 0: expected 1 to 16"),
        ("--embed-rank 99", "--embed-rank 99: expected 1 to 16"),
        ("--embed-rank 4 --share-decoder-input-output-embed", "--embed-rank 4 does not go with"),
        ("--attention-sites encoder", "--attention-sites encoder: this model has no such attention"),
        ("--decoder-output-dim 0", "--decoder-output-dim 0: expected a number >= 1"),
        ("--decoder-input-dim -1", "--decoder-input-dim -1: expected a number >= 1"),
        ("--self-target", "Unsupported language modeling target"),
        ("--dropout 1.5", "--dropout 1.5: expected a number from 0"),
        ("--attention nope", "argument --attention: invalid choice: 'nope'"),
        ("--head-mixing nope", "argument --head-mixing: invalid choice"),
    ],
    "fairseq-train": [
        ("", "--arch is missing: expected an architecture"),
        ("mt", "--arch is missing: expected an architecture"),
        ("mt --arch nope", "argument --arch/-a: invalid choice: 'nope'"),
        ("mt --arch transformer --task nope", "argument --task: invalid choice: 'nope'"),
        (f"nothing --arch transformer {QUICKLY} --save-dir out", "nothing: expected a folder that fairseq-preprocess"),
        (f"nothing --arch lowrank_transformer {QUICKLY} --save-dir out", "nothing: expected a folder"),
        (f"bare --arch transformer {QUICKLY} --save-dir out", "Could not infer language pair"),
        (
            f"bare -s de -t en --arch transformer {QUICKLY} --save-dir out",
            "bare/dict.de.txt: No such file or directory",
        ),
        (
            f"mt --task language_modeling --arch transformer_lm {QUICKLY} --save-dir out",
            "mt/dict.txt: No such file or directory",
        ),
        ("mt --arch transformer --optimizer adam --cpu --save-dir out", "either with --max-tokens or --batch-size"),
        (f"one --arch transformer {ENCODER} {DECODER}", "1 sentences make no batch"),
    ],
    GENERATE: [
        ("", "--path is missing: expected a checkpoint"),
        ("--path nope.pt", "--path nope.pt: expected a checkpoint, and there is no such file"),
        ("--path mixhead.pt:nope.pt", "--path nope.pt: expected a checkpoint"),
        ("--path bare", "--path bare: expected a checkpoint"),
        ("--path mixhead.pt --beam 0", "--beam 0: expected a number >= 1"),
        ("--path mixhead.pt --nbest 0", "--nbest 0: expected a number >= 1"),
        ("--path mixhead.pt --max-tokens 0", "--max-tokens 0: expected a number >= 1"),
        ("--path mixhead.pt --shard-id 5 --num-shards 2", "--shard-id 5 --num-shards 2: expected shards"),
        ("--path mixhead.pt --model-overrides 3", "expected a dictionary"),
        ("--path mixhead.pt --model-overrides {'attention':", "--model-overrides"),
        ("--path mixhead.pt --model-overrides \"__import__('os').mkdir('out')\"", "--model-overrides"),
        ("--path mixhead.pt --scoring nope", "argument --scoring: invalid choice"),
        ("--path mixhead.pt --constraints nope", "argument --constraints: invalid choice"),
    ],
    f"fairseq-generate mt {EVALUATED} --path mixhead.pt --max-len-b 4": [
        ("--model-overrides \"{'attention': 'nope'}\"", "attention preset 'nope': expected one of mha"),
        ("--model-overrides \"{'encoder_attention_heads': 3}\"", "embed_dim=16 is not divisible by num_heads=3"),
        ("--model-overrides \"{'encoder_embed_dim': 32}\"", "The checkpoint is of another model"),
        ("--sampling", "--sampling requires --nbest to be equal to --beam"),
        ("--gen-subset nope", "Dataset not found: nope (mt)"),
        ("--min-len 50", "min_len cannot be larger than max_len"),
        ("--results-path words.de", "words.de: File exists"),
    ],
    "fairseq-generate": [
        ("", "the following arguments are required: data"),
        (f"nothing --path mixhead.pt {EVALUATED}", "nothing: expected a folder that fairseq-preprocess wrote"),
        (f"lm --path mixhead.pt {EVALUATED}", "Could not infer language pair"),
        (f"mt --path words.de {EVALUATED}", "words.de cannot be read as a checkpoint"),
        (f"mt --path empty.txt {EVALUATED}", "empty.txt cannot be read as a checkpoint"),
        (f"no-bin --path mixhead.pt {EVALUATED}", "Dataset not found: test (no-bin)"),
        (f"bad-magic --path mixhead.pt {EVALUATED}", "bad-magic/test.de-en.de.idx is no index"),
        (f"bad-words --path mixhead.pt {EVALUATED}", "Incorrect encoding detected in bad-words/dict.de.txt"),
        (f"bad-counts --path mixhead.pt {EVALUATED}", "Incorrect dictionary format"),
        (f"mt --path cut.pt {EVALUATED}", "cut.pt"),
        (f"mt --path flipped.pt {EVALUATED}", "flipped.pt"),
        (f"float-words --path mixhead.pt {EVALUATED}", "float-words/test.de-en.de"),
        (f"unknown-type --path mixhead.pt {EVALUATED}", "unknown-type/test.de-en.de"),
        (f"hostile-count --path mixhead.pt {EVALUATED}", "hostile-count/test.de-en.de"),
        (f"other-count --path mixhead.pt {EVALUATED}", "other-count/test.de-en.de"),
        (f"negative-size --path mixhead.pt {EVALUATED}", "negative-size/test.de-en.de"),
        (f"hostile-size --path mixhead.pt {EVALUATED}", "hostile-size/test.de-en.de"),
        (f"negative-place --path mixhead.pt {EVALUATED}", "negative-place/test.de-en.de"),
        (f"cut-index --path mixhead.pt {EVALUATED}", "cut-index/test.de-en.de"),
        (f"cut-words --path mixhead.pt {EVALUATED}", "cut-words/test.de-en.de"),
        (f"no-words --path mixhead.pt {EVALUATED}", "no-words/test.de-en.de"),
        (f"few-words --path mixhead.pt {EVALUATED}", "encoder.embed_tokens.weight is [16, 16] in the checkpoint"),
    ],
    INTERACTIVE: [
        ("", "--path is missing: expected a checkpoint"),
        ("--path nope.pt", "--path nope.pt: expected a checkpoint"),
        ("--path mixhead.pt --input nope.txt", "--input nope.txt: No such file or directory"),
        ("--path mixhead.pt --input latin1.de", "--input latin1.de: expected text in UTF-8, and line 2 is not"),
        ("--path mixhead.pt --batch-size 8", "--batch-size cannot be larger than --buffer-size"),
        ("--path mixhead.pt --model-overrides nope", "--model-overrides"),
        ("--path mixhead.pt --tokenizer nope", "argument --tokenizer: invalid choice"),
        ("--path words.de", "words.de cannot be read as a checkpoint"),
        ("--path flipped-mixhead.pt", "flipped-mixhead.pt cannot be read as a checkpoint"),
    ],
    EVAL_LM: [
        ("", "--path is missing: expected a checkpoint"),
        ("--path nope.pt", "--path nope.pt: expected a checkpoint"),
        ("--path lm.pt --context-window -1", "--context-window -1: expected a number of tokens >= 0"),
        ("--path lm.pt --max-tokens 0", "--max-tokens 0: expected a number >= 1"),
        ("--path lm.pt --tokens-per-sample -5", "--tokens-per-sample -5: expected a number >= 1"),
        ("--path lm.pt --context-window 16", "--tokens-per-sample must be above --context-window"),
        ("--path lm.pt --tokens-per-sample 1024", "longer than the 16 tokens the model accepts"),
        ("--path lm.pt --gen-subset nope", "Dataset not found: nope"),
        ("--path lm.pt --model-overrides \"{'attention':'nope'}\"", "attention preset 'nope': expected one of mha"),
        ("--path lm.pt --model-overrides [1]", "expected a dictionary"),
        ("--path words.de", "words.de cannot be read as a checkpoint"),
        ("--path flipped.pt", "flipped.pt cannot be read as a checkpoint"),
        ("--path lm.pt --model-overrides nope(", "--model-overrides"),
    ],
    VALIDATE: [
        ("--path mixhead.pt", "--task is missing: expected the task of the training"),
        ("--task translation --max-tokens 99", "--path is missing: expected a checkpoint"),
        ("--task translation --path nope.pt", "--path nope.pt: expected a checkpoint"),
        ("--task translation --path mixhead.pt", "Must specify batch size"),
        ("--task translation --path mixhead.pt --max-tokens 0", "--max-tokens 0: expected a number >= 1"),
        ("--task translation --path mixhead.pt --model-overrides print(3)", "--model-overrides"),
        ("--task translation --max-tokens 99 --path words.de", "words.de cannot be read as a checkpoint"),
        ("--task translation --max-tokens 99 --path flipped-mixhead.pt", "flipped-mixhead.pt cannot be read as"),
        ("--task translation --path mixhead.pt --max-tokens 99 --valid-subset nope", "Dataset not found: nope (mt)"),
    ],
    PREPROCESS: [
        ("", "--trainpref is missing"),
        ("--trainpref nope", "nope.de: No such file or directory"),
        ("--trainpref latin1", "latin1.de: expected text in UTF-8, and line 2 is not"),
        ("--trainpref words --validpref latin1", "latin1.de: expected text in UTF-8"),
        ("--trainpref words --testpref words,nope", "nope.de: No such file or directory"),
        ("--trainpref words --srcdict nope", "nope: expected a dictionary, and there is no such file"),
        ("--trainpref words --workers 0", "--workers 0: expected a number >= 1"),
        ("--trainpref words --dataset-impl nope", "argument --dataset-impl: invalid choice"),
        ("--trainpref words --destdir mt", "mt/dict.de.txt is there already"),
        ("--trainpref words --destdir words.de", "--destdir words.de: expected a folder"),
    ],
    "fairseq-preprocess": [
        ("", "--trainpref is missing"),
        ("--trainpref words --destdir out", "--source-lang and --target-lang"),
        ("-s de --trainpref words --destdir out", "--source-lang and --target-lang"),
    ],
    "fairseq-score": [
        ("", "the following arguments are required: -r/--ref"),
        ("-s nope -r words.en", "System output file nope does not exist"),
        ("-s words.en -r nope", "Reference file nope does not exist"),
        ("-s words.en -r latin1.de", "a text is not in UTF-8"),
        ("-s empty.txt -r empty.txt", "ZeroDivisionError"),
    ],
    "fairseq-hydra-train hydra.run.dir=hydra common.cpu=true dataset.max_tokens=99 criterion=cross_entropy": [
        ("task=language_modeling model=lowrank_transformer_lm task.data=nothing", "nothing/dict.txt: No such file"),
    ],
    OURS: [
        ("", "the following arguments are required: COMMAND"),
        ("nope", "invalid choice: 'nope'"),
        ("env --nope", "unrecognized arguments: --nope"),
        ("user-dir extra", "unrecognized arguments: extra"),
        ("average mixhead.pt", "the following arguments are required: --output"),
        ("average mixhead.pt --output out/a.pt", "--output out/a.pt"),
        ("average nope.pt --output average.pt", "nope.pt"),
        ("average words.de --output average.pt", "words.de cannot be read as a checkpoint"),
        ("average mixhead.pt flipped.pt --output average.pt", "flipped.pt"),
        ("inspect cut.pt", "cut.pt"),
        ("advise --checkpoint flipped.pt --length 5", "flipped.pt"),
        ("average mixhead.pt lm.pt --output average.pt", "are of different models"),
        ("convert flipped-mixhead.pt --attention mha --output convert.pt", "flipped-mixhead.pt"),
        ("convert words.de --attention mha --output convert.pt", "words.de cannot be read as a checkpoint"),
        ("convert mixhead.pt --attention mha --output out/convert.pt", "--output out/convert.pt"),
        ("spectrum words.de", "words.de cannot be read as a checkpoint"),
        ("spectrum flipped.pt", "flipped.pt cannot be read as a checkpoint"),
        ("inspect words.de", "words.de cannot be read as a checkpoint"),
        ("inspect flipped.pt", "flipped.pt cannot be read as a checkpoint"),
        ("params --arch lowrank_transformer", "the following arguments are required: --vocab-size"),
        ("params --arch lowrank_transformer --vocab-size 0", "--vocab-size 0: expected at least 4"),
        ("params --arch lowrank_transformer --vocab-size x", "argument --vocab-size: invalid int value"),
        ("params --arch nope --vocab-size 9", "--arch nope: unknown"),
        ("params --arch lowrank_transformer --vocab-size 9 --sweep nope", "argument --sweep: invalid choice"),
        ("params --arch lowrank_transformer --vocab-size 9 --attention nope", "invalid choice: 'nope'"),
        ("params --arch lowrank_transformer --vocab-size 9 --encoder-layers 0", "--encoder-layers 0: expected"),
        ("params --arch lowrank_transformer --vocab-size 9 --head-dim 100000000000", "--head-dim 100000000000"),
        ("advise", "one of the arguments --checkpoint --arch is required"),
        ("advise --arch nope --length 3", "--arch nope: unknown"),
        ("advise --arch lowrank_transformer --length 8", "--arch needs --vocab-size"),
        ("advise --arch lowrank_transformer --length 0 --vocab-size 9", "--length 0: expected at least 1"),
        ("advise --arch lowrank_transformer --data nothing", "--data nothing: no such folder"),
        ("advise --arch lowrank_transformer --data bare", "bare holds no dict.txt"),
        ("advise --checkpoint nope.pt --length 5", "nope.pt is not a checkpoint file"),
        ("advise --checkpoint words.de --length 5", "words.de cannot be read as a checkpoint"),
        ("advise --checkpoint mixhead.pt --length 5 --vocab-size 3", "has a vocabulary of 16"),
        ("advise --checkpoint mixhead.pt --length 5 --encoder-layers 3", "--encoder-layers 3 has no place here"),
        ("advise --checkpoint mixhead.pt --arch lowrank_transformer", "not allowed with argument"),
        ("spectrum", "the following arguments are required: CKPT"),
        ("spectrum nope.pt", "nope.pt is not a checkpoint file"),
        ("spectrum mixhead.pt --data nothing", "the data folder nothing"),
        ("spectrum mixhead.pt --data lm", "Could not infer language pair"),
        ("spectrum mixhead.pt --data mt --sequences 0", "--sequences 0: expected at least 1"),
        ("spectrum mixhead.pt --data mt --labels a b", "--labels: 2 names for 1 checkpoints"),
        ("inspect bare", "bare is not a checkpoint file"),
        ("inspect empty.txt", "empty.txt cannot be read as a checkpoint"),
        ("launch", "after -- comes fairseq-train and its arguments"),
        ("launch --workers 0 -- fairseq-train x", "--workers 0: at least 1"),
        ("launch --workers 2 -- rm -rf x", "not rm"),
        ("launch --workers 2 --nodes 2 -- fairseq-train x", "--nodes above 1 and --rendezvous"),
        *(
            (f"{command} --output words.de", "--output words.de: words.de")  # before anything else is read
            for command in (
                "spectrum nope.pt",
                "inspect nope.pt",
                "params --arch nope --vocab-size 9",
            )
        ),
        ("average nope.pt --output bare", "--output bare: is a folder"),
        ("average nope.pt --output words.de", "--output words.de: expected the name of a checkpoint"),
        ("convert nope.pt --attention mha --output words.de", "--output words.de: expected the name of a checkpoint"),
    ],
    EXPERIMENTS: [
        ("representation --length 0", "expected at least 2"),
        ("representation --embed-dim 0", "must be at least the length 16"),
        ("representation --head-dims nope", "argument --head-dims: invalid int value"),
        ("report", "the following arguments are required"),
        ("report nope", "nope does not exist"),
        ("report bare", "bare holds no .jsonl file"),
        ("report empty.txt", "no results in empty.txt"),
        ("report wrong.jsonl", 'wrong.jsonl, line 1: seed is "1", expected a number'),
        ("report nope --output words.de", "--output words.de: words.de"),
        ("representation --length 0 --output words.de", "--output words.de: words.de"),
    ],
}


def write_texts(folder: Path) -> None:
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx"]
    sentences = [" ".join(words[(start + step) % 12] for step in range(3 + start % 5)) for start in range(24)]
    (folder / "words.de").write_text("\n".join(sentences) + "\n")
    (folder / "words.en").write_text("\n".join(sentences).upper() + "\n")
    (folder / "latin1.de").write_bytes("ab cd\nfünf\n".encode("latin-1"))
    (folder / "latin1.en").write_text("AB CD\nFIVE\n")
    (folder / "sentence.de").write_text("ab cd\n")
    (folder / "sentence.en").write_text("AB CD\n")
    (folder / "empty.txt").touch()
    (folder / "bare").mkdir()
    fields = {"paper": "mixhead", "table": 1, "row": "mha", "seed": 1, "updates": 5, "parameters": 9, "value": 3.5}
    fields |= {"architecture": "x", "flags": [], "metric": "bleu", "split": "test", "tokens_per_second": None}
    fields |= {"versions": {}, "smoke": False, "date": "2026-01-01"}
    wrong = {"seed": "1", "value": "high", "smoke": 0, "flags": 3, "versions": [], "curve": [5], "date": None}
    lines = [json.dumps(fields | {field: value}) for field, value in wrong.items()]
    (folder / "wrong.jsonl").write_text("\n".join(lines) + "\n")


def damage(folder: Path) -> None:
    """Copies of the data, each with one thing wrong."""

    def copy(name: str) -> Path:
        shutil.copytree(folder / "mt", folder / name)
        return folder / name

    (copy("no-bin") / "test.de-en.de.bin").unlink()
    (copy("bad-magic") / "test.de-en.de.idx").write_bytes(b"nonsense" * 9)
    (copy("bad-words") / "dict.de.txt").write_bytes(b"ab\xff 3\n")
    (copy("bad-counts") / "dict.de.txt").write_text("ab three\n")
    (copy("few-words") / "dict.de.txt").write_text("ab 3\n")
    # 9 bytes of magic and 8 of version, then the type, the number of sentences, their sizes, their places
    for name, place, value in (
        ("float-words", 17, b"\7"),
        ("unknown-type", 17, b"\x63"),
        ("hostile-count", 18, struct.pack("<Q", 1 << 60)),
        ("other-count", 18, struct.pack("<Q", 25)),
        ("negative-size", 26, struct.pack("<i", -4)),
        ("hostile-size", 26, struct.pack("<i", 1 << 30)),
        ("negative-place", 26 + 24 * 4 + 8, struct.pack("<q", -8)),
    ):
        index = copy(name) / "test.de-en.de.idx"
        written = bytearray(index.read_bytes())
        written[place : place + len(value)] = value
        index.write_bytes(written)
    os.truncate(copy("cut-index") / "test.de-en.de.idx", 30)
    os.truncate(copy("cut-words") / "test.de-en.de.bin", 2)
    os.truncate(copy("no-words") / "test.de-en.de.bin", 0)


def damage_checkpoint(folder: Path) -> None:
    """Copies of checkpoints: cut short, and with one bit flipped among the parameters."""
    written = bytearray((folder / "mixhead.pt").read_bytes())
    (folder / "cut.pt").write_bytes(written[: len(written) // 2])
    for name, flipped in (("lm.pt", "flipped.pt"), ("mixhead.pt", "flipped-mixhead.pt")):
        with torch.serialization.safe_globals([argparse.Namespace]):
            parameters = torch.load(folder / name, weights_only=True)["model"]
        written = bytearray((folder / name).read_bytes())
        # not in the padding between tensors, where a bit says nothing
        written[written.index(parameters["decoder.embed_tokens.weight"].numpy().tobytes()) + 99] ^= 16
        (folder / flipped).write_bytes(written)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``run("fairseq-train mt …")``: exit code, output, errors, and what lies in ``out`` afterwards."""
    folder = tmp_path_factory.mktemp("refusals")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("LOWRANK_TRACEBACK", None)
    server = subprocess.Popen(
        [sys.executable, REPOSITORY / "tests" / "helpers" / "command_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )

    def ask(line: str, **variables: str) -> tuple[int, str, str, list[Path]]:
        shutil.rmtree(folder / "out", ignore_errors=True)
        command, *args = shlex.split(line)
        question = {"command": command, "args": args, "folder": str(folder), "environment": variables}
        print(json.dumps(question), file=server.stdin, flush=True)
        answer = json.loads(server.stdout.readline())
        written = [path for path in (folder / "out").rglob("*") if path.is_file()]
        return answer["code"], answer["output"], answer["errors"], written

    def make(line: str) -> None:
        code, output, errors, _ = ask(line)
        assert code == 0, output + errors

    write_texts(folder)
    corpus = "-s de -t en --trainpref words --validpref words --testpref words"
    make(f"fairseq-preprocess {corpus} --destdir mt")
    make("fairseq-preprocess --only-source --trainpref words.de --validpref words.de --testpref words.de --destdir lm")
    make("fairseq-preprocess -s de -t en --trainpref sentence --validpref sentence --destdir one")
    damage(folder)
    trainings = {"mixhead.pt": f"{TRANSLATION} --attention mixhead-b", "stock.pt": STOCK, "lm.pt": LANGUAGE_MODEL}
    for name, line in trainings.items():
        make(line)
        (folder / "out" / "checkpoint_last.pt").rename(folder / name)
    damage_checkpoint(folder)
    yield ask
    server.stdin.close()
    server.wait()


LINES = [(f"{command} {args}".strip(), words) for command, cases in CASES.items() for args, words in cases]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line for line, _ in LINES])
def test_bad_input_ends_in_one_line_and_leaves_nothing_behind(run, line, words):
    code, output, errors, written = run(line)
    assert code == 2, output + errors
    lines = [said for said in errors.splitlines() if ": error: " in said]
    assert len(lines) == 1, errors
    assert errors.splitlines()[-1] == lines[0]
    assert line.split()[0] in lines[0]
    assert words in lines[0]
    assert "Traceback" not in output + errors
    assert not written


def test_the_traceback_is_shown_where_the_environment_asks_for_it(run):
    code, _, errors, _ = run(f"fairseq-train nothing --arch transformer {QUICKLY}", LOWRANK_TRACEBACK="1")
    assert code == 2
    assert "Traceback (most recent call last)" in errors
    assert errors.splitlines()[-1] == (
        "fairseq-train: error: nothing: expected a folder that fairseq-preprocess wrote, and there is none"
    )


def test_a_refused_generation_leaves_the_hypotheses_of_an_earlier_one(run):
    code, _, errors, (written,) = run(f"{GENERATE} --path mixhead.pt --max-len-b 4")
    assert code == 0, errors
    assert written.name == "generate-test.txt" and "\nD-" in written.read_text()
    earlier = written.rename(written.parent.parent / written.name)
    again = "fairseq-generate mt --cpu --num-workers 0 --results-path . --path mixhead.pt"
    code, _, errors, _ = run(f"{again} --gen-subset test --min-len 500")
    assert code == 2 and "min_len" in errors
    assert "\nD-" in earlier.read_text()
    assert not earlier.with_name("generate-test.txt.tmp").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"preset": "nope"}, "attention preset 'nope': expected one of mha"),
        ({"preset": "fixedhead"}, "needs a head size"),
        ({"num_heads": 3}, "embed_dim=8 is not divisible by num_heads=3"),
        ({"num_heads": 0}, "num_heads=0: expected a positive integer"),
        ({"num_heads": -2}, "num_heads=-2: expected a positive integer"),
        ({"head_dim": 0}, "head_dim=0: expected a positive integer"),
        ({"head_dim": -1}, "head_dim=-1: expected a positive integer"),
        ({"projection": "nope"}, "projection='nope': expected one of"),
        ({"activation": "nope"}, "activation='nope': expected one of"),
        ({"mixing": "nope"}, "mixing='nope': expected one of"),
        ({"backend": "nope"}, "nope"),
        ({"preset": "el", "head_dim": 3}, "'el' cuts the hidden states into heads"),
        ({"preset": "talking-heads", "backend": "sdpa"}, "backend='sdpa' cannot compute head mixing of scores"),
        ({"num_heads": "4"}, "num_heads='4': expected a positive integer"),
        ({"embed_dim": 0}, "embed_dim=0: expected a positive integer"),
        ({"embed_dim": 8.0}, "embed_dim=8.0: expected a positive integer"),
        ({"head_dim": 8.5}, "head_dim=8.5: expected a positive integer"),
        ({"head_dim": 10**11}, "a projection would hold 1,600,000,000,000 numbers"),
        ({"dropout": 1.5}, "dropout=1.5: expected a number"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_is_refused_in_one_line(arguments, words):
    with torch.device("meta"), pytest.raises(ValueError) as error:
        build_attention(**({"preset": "mha", "embed_dim": 8, "num_heads": 2} | arguments))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("scripts/quickstart.sh --data nope", "--data nope: expected grammar or multi30k"),
        ("scripts/quickstart.sh --nope", "unknown argument '--nope'"),
        ("scripts/quickstart.sh --attention", "--attention needs a value"),
        ("env GPUS=x examples/multi30k/compare.sh", "GPUS=x: expected a number up to"),
        ("examples/multi30k/compare.sh mha", "mha"),
        ("env SMOKE=maybe examples/multi30k/compare.sh", "SMOKE=maybe: expected 1, or 0 for off"),
        ("env SEED=abc examples/brown/compare.sh", "SEED=abc"),
        ("env THREADS=0 examples/mhe/wmt14.sh", "THREADS=0: expected a whole number from 1"),
        ("env ROWS=nope examples/fixedhead/iwslt14.sh", "nope"),
        ("env EXTRA='--seed 3' examples/multi30k/compare.sh", "--seed"),
        ("env LOWRANK_DATA=/nothing examples/multi30k/compare.sh", "/nothing/multi30k lacks train.de.gz"),
    ],
)
def test_a_script_refuses_in_one_line(line, words, tmp_path):
    settings = {"SETUP": "0", "LOWRANK_WORK": str(tmp_path / "work"), "RESULTS": str(tmp_path / "results.jsonl")}
    refused = subprocess.run(
        shlex.split(line), cwd=REPOSITORY, env=os.environ | settings, capture_output=True, text=True
    )
    assert refused.returncode == 2
    (said,) = [line for line in refused.stderr.splitlines() if not line.startswith("+ ")]  # + COMMAND that it runs
    assert words in said
    assert not (tmp_path / "results.jsonl").exists()
