# Training settings that several recipes share, each with its source. Sourced after common.sh.

# IWSLT'14: fairseq's recipe for it (examples/translation/README.md). The Mixhead paper (§4.2.3) gives the sizes and says
# no more; fairseq's recipe sets no end, 50 epochs is our choice. Scored is the checkpoint of the best validation loss; newer versions
# of fairseq's recipe take that of the best validation BLEU.
IWSLT14=(
    --source-lang de --target-lang en --share-decoder-input-output-embed
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --dropout 0.3 --weight-decay 0.0001
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 0.0
    --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 $(batch 4096 4096)
    --max-epoch 50 --no-epoch-checkpoints
)

# Where the Mixhead paper's translation models mix. The authors' released multihead_attention.py (github.com/zhongzhang1/mixhead)
# mixes neither cross attention nor, during beam search, the decoder's self-attention: only calls without static_kv and without
# incremental_state are mixed. Here mixing follows it to the encoder and the decoder, and is there in beam search too.
# SITES=all in the environment mixes cross attention as well, in separate tables.
SITES="${SITES:-encoder,decoder}"
case "$SITES" in
    encoder,decoder) MIXING_SITES=(--attention-sites "$SITES") OTHER_SITES="" ;;
    all) MIXING_SITES=() OTHER_SITES=-all-sites ;;
    *)
        echo "SITES=$SITES: expected all, or encoder,decoder" >&2
        exit 2
        ;;
esac

# mixing_rows PREFIX FLAGS…: declare the rows PREFIXmha, PREFIXmixhead-a and PREFIXmixhead-b, which mix at these sites.
mixing_rows() {
    row "$1mha" "${@:2}" --attention mha
    row "$1mixhead-a" "${@:2}" --attention mixhead-a "${MIXING_SITES[@]}"
    row "$1mixhead-b" "${@:2}" --attention mixhead-b "${MIXING_SITES[@]}"
}

# WMT'14: fairseq's recipe for the big model of Vaswani et al. (2017) (examples/scaling_nmt/README.md); 25,000 tokens an
# update, as in that paper. Rows give the lr by size: that recipe's for big, for base that of fairseq's mixtures of base
# models on WMT'17 (examples/translation_moe/README.md).
WMT14_BASE_LR="--lr 0.0007" WMT14_BIG_LR="--lr 0.0005"
WMT14=(
    --source-lang en --target-lang de --share-all-embeddings
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 0.0
    --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 $(batch 3584 25088)
    --save-interval-updates 5000 --keep-interval-updates 5 --no-epoch-checkpoints
)

# fairseq rounds the sequences of a step down to a multiple of 8, which would change the batch with their length.
WHOLE_STEPS=(--required-batch-size-multiple 1)

# Vanilla Transformer language model: fairseq's recipe (examples/language_model/README.md), 32,768 tokens an update. Recipes say
# how many updates; fairseq's has 50,000.
VANILLA_LM=(
    --task language_modeling --sample-break-mode none
    --dropout 0.1 --optimizer adam --adam-betas 0.9,0.98 --weight-decay 0.01 --clip-norm 0.0
    --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 $(batch 2048 32768 512)
    "${WHOLE_STEPS[@]}" --no-epoch-checkpoints
)

# Baevski and Auli (2019) as published in fairseq (examples/language_model/README.adaptive_inputs.md): 8 GPUs × 3,072
# tokens × 3. The Mixhead paper (§4.1.2) halves the effective batch, so it is 36,864 tokens here.
BAEVSKI=(
    --task language_modeling --sample-break-mode none --criterion adaptive_loss --ddp-backend legacy_ddp
    --optimizer nag --lr 1.0 --min-lr 0.0001 --lr-scheduler cosine --t-mult 2 --lr-period-updates 270000 --lr-shrink 0.75
    --warmup-updates 16000 --warmup-init-lr 1e-07 --stop-min-lr 1e-09 --clip-norm 0.1 $(batch 3072 36864 512)
    "${WHOLE_STEPS[@]}" --max-update 286000 --save-interval-updates 10000 --keep-interval-updates 2 --no-epoch-checkpoints
)

# The same on LM1B: learning rates and their three cycles as in Baevski and Auli (2019). The Mixhead paper
# (§4.1.3) says that the original takes 64 GPUs, and halves the effective batch: of 2,048 tokens on each, 65,536.
BAEVSKI_LM1B=("${BAEVSKI[@]}" --min-lr 1e-05 --lr-period-updates 137000 --lr-shrink 0.6 --max-update 975000)

# Transformer-XL: the authors' script for their base model on WikiText-103 (kimiyoung/transformer-xl, run_wt103_base.sh): 60
# streams of segments of 150 with memory of 150, Adam, cosine. Several GPUs share the streams.
TRANSFORMER_XL_WIKI2=(
    --task segment_lm --tokens-per-sample 150 --memory-length 150
    --optimizer adam --lr 0.00025 --lr-scheduler cosine --clip-norm 0.25 $(batch 9000 9000 150)
    --batch-size-valid 10 --save-interval-updates 10000 --keep-interval-updates 2 --no-epoch-checkpoints
)
TRANSFORMER_XL=("${TRANSFORMER_XL_WIKI2[@]}" --criterion adaptive_loss --ddp-backend legacy_ddp --max-update 200000)

# The same on LM1B (run_lm1b_base.sh): 224 streams of segments of 32 with memory of 32.
TRANSFORMER_XL_LM1B=(
    "${TRANSFORMER_XL[@]}" --tokens-per-sample 32 --memory-length 32 $(batch 7168 7168 32) --warmup-updates 20000
    --max-update 500000
)

# The fixed multi-head attention paper's language model (§4.1): Adam, tensor2tensor, and an input of one example, capped at
# 256 subwords, so a sentence of LM1B and no block of running text. The rest is fairseq's recipe for a vanilla Transformer
# and 300,000 updates: our text gives no more.
LM1B_EXAMPLES=(--sample-break-mode eos --shorten-method truncate)
LM1B_SMALL=("${VANILLA_LM[@]}" "${LM1B_EXAMPLES[@]}" --tokens-per-sample 256 --max-update 300000)

# The vocabulary bottleneck paper's language models (§5): 1M updates, untied. Its training text, Wikipedia, BookCorpus and
# OpenWebText, is not published as one: raw WikiText-103 takes its place. Positions are learned, as in equation 1;
# POSITIONS=sinusoidal in the environment takes fairseq's others, in separate tables. The rest is fairseq's recipe for a vanilla
# Transformer with pre-norm, since our text has no appendix. What is scored is what the paper
# plots (§5): the loss on a test set, here in nats a token, on blocks with no window of further context before them; the paper names neither.
POSITIONS="${POSITIONS:-learned}"
case "$POSITIONS" in
    learned) POSITION_FLAGS=(--decoder-learned-pos) OTHER_POSITIONS="" ;;
    sinusoidal) POSITION_FLAGS=() OTHER_POSITIONS=-sinusoidal ;;
    *)
        echo "POSITIONS=$POSITIONS: expected learned or sinusoidal" >&2
        exit 2
        ;;
esac
VOCABULARY_LM=(
    --arch lowrank_transformer_lm --decoder-normalize-before "${POSITION_FLAGS[@]}" "${VANILLA_LM[@]}"
    --tokens-per-sample 512 --max-update 1000000
)

# loss_on_blocks: score rows as above.
loss_on_blocks() {
    local METRIC=loss EVALUATE="--context-window 0 ${EVALUATE:-}" # what is exported in a function outlives VARIABLE=… before its call
    language_model_rows
}

# Evidence: Multi30k, joined or not, in a model small enough for several seeds of each row. 3+3 layers, d 128, feed-forward
# 4·d; 4,096 target tokens an update. Rows or tables give the rate, its schedule and the end.
EVIDENCE=(
    --source-lang de --target-lang en --share-all-embeddings $(layers 3) $(width 128) --dropout 0.2
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas 0.9,0.98 $(batch 4096 4096) --no-epoch-checkpoints
)

# Evidence: a language model of bytes, pre-norm as in the papers' models: n 256, 2,048 bytes an update. BYTES_LM has 4 layers of
# d 128.
BYTES=(
    --task language_modeling --sample-break-mode none --tokens-per-sample 256 --decoder-normalize-before --dropout 0.1
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 1.0 $(batch 2048 2048 256) "${WHOLE_STEPS[@]}" --no-epoch-checkpoints
)
BYTES_LM=("${BYTES[@]}" --share-decoder-input-output-embed --decoder-layers 4 $(lm_width 128))

# decayed RATE UPDATES: up to the rate over the first tenth of the updates, then in a straight line down to 0 at their end.
decayed() {
    echo "--lr $1 --lr-scheduler polynomial_decay --warmup-updates $(($2 / 10)) --total-num-update $2 --max-update $2"
}

# Pre-training as BERT's (Devlin et al., 2019, A.2): masked words and next sentences, Adam, 10,000 of 1M updates to warm up, 256
# sequences an update, of 128 tokens in the first nine tenths of the updates and of 512 in the rest. Its text, Wikipedia and
# BookCorpus, is not published as one. Raw WikiText-103 in 30,000 subwords takes its place, with articles as documents and
# paragraphs as lines.
BERT_SETTINGS=(
    --task bert_pretraining --criterion bert_pretraining --max-positions 512
    --dropout 0.1 --attention-dropout 0.1 --optimizer adam --adam-betas 0.9,0.999 --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
    --lr 1e-4 --lr-scheduler polynomial_decay --warmup-updates 10000 --total-num-update 1000000
    "${WHOLE_STEPS[@]}" --save-interval-updates 10000 --keep-interval-updates 2 --no-epoch-checkpoints
)
BERT_AT_128=("${BERT_SETTINGS[@]}" --tokens-per-sample 128 $(batch 8192 32768 128) --max-update 900000)
BERT_PRETRAINING=("${BERT_SETTINGS[@]}" --tokens-per-sample 512 $(batch 8192 131072 512) --max-update 1000000)

# bert_pretraining NAME FLAGS…: declare a pre-training at both lengths. The second part continues the first one's optimizer.
bert_pretraining() {
    pretraining "$1-n128" "${@:2}" "${BERT_AT_128[@]}"
    continued "$1" "$1-n128" "${@:2}" "${BERT_PRETRAINING[@]}"
}
BERT_CORPUS=wikitext-103-documents-bpe30000

# Fine-tuning as BERT's (Devlin et al., 2019, A.3, and their published code): Adam, dropout 0.1, a tenth of the updates to warm up
# and then down to 0. Kept is the checkpoint that does best on validation, after each epoch.
FINE_TUNING=(
    --dropout 0.1 --attention-dropout 0.1 --optimizer adam --adam-betas 0.9,0.999 --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0
    --lr-scheduler polynomial_decay --no-epoch-checkpoints
)

# Training examples of each task (of SQuAD windows of 384 tokens, 128 apart, about), as published.
declare -A EXAMPLES=(
    [glue-cola]=8551 [glue-sst-2]=67349 [glue-mrpc]=3668 [glue-sts-b]=5749 [glue-qqp]=363846 [glue-mnli]=392702 [glue-qnli]=104743
    [glue-rte]=2490 [glue-wnli]=635 [superglue-boolq]=9427 [superglue-cb]=250 [superglue-rte]=2490 [superglue-wic]=5428
    [superglue-multirc]=27243 [squad-1.1]=88641 [squad-2.0]=132335 [sentence-polarity]=8530 [rte]=3038
)

# updates EXAMPLES EPOCHS BATCH: flags of that many epochs, split over the GPUs.
updates() {
    local gpus=$((GPU_COUNT > 1 ? GPU_COUNT : 1)) count=$((($1 * $2 + $3 - 1) / $3))
    echo "--batch-size $((($3 + gpus - 1) / gpus)) --max-update $count --total-num-update $count --warmup-updates $(((count + 9) / 10))"
}

# fine_tune LABEL FORM SUFFIX EPOCHS[xBATCH] FLAGS…: declare the row LABEL@TASK on a corpus of EXAMPLES, in batches of 32 (BERT's)
# where no other size is given, cut into subwords as SUFFIX of the corpus's name says.
fine_tune() {
    local CORPUS="$2$3" batch=32
    if [[ "$4" == *x* ]]; then batch="${4#*x}"; fi
    row "$1@${2#glue-}" "${@:5}" $(updates "${EXAMPLES[$2]}" "${4%x*}" "$batch")
}

# A small BERT on the Brown corpus, for pre-training and for what starts from it. Sizes, rates and updates are our choice.
BROWN_BERT_MODEL=(
    --arch lowrank_bert_base --max-positions 128
    --encoder-layers 4 --encoder-embed-dim 256 --encoder-ffn-embed-dim 1024 --encoder-attention-heads 8
)
BROWN_BERT=(
    "${BROWN_BERT_MODEL[@]}" --task bert_pretraining --criterion bert_pretraining --tokens-per-sample 128
    --optimizer adam --adam-betas 0.9,0.999 --adam-eps 1e-06 --weight-decay 0.01 --clip-norm 1.0
    --lr 1e-3 --lr-scheduler polynomial_decay --warmup-updates 200 --total-num-update 2000 --max-update 2000
    $(batch 2048 2048 128) "${WHOLE_STEPS[@]}" --no-epoch-checkpoints
)
