"""Models of fairseq that were exported: configuration, models and tokenizer, registered with the Auto classes of transformers.

One pair of models covers fairseq's transformers, because no single model of transformers has post-norm and pre-norm, learned
and computed positions, and two vocabularies. Plain attention is transformers' own module (M2M100's), so its kernels, static
caches and ``apply_attention`` work. Any other attention is a layer of this package, since most methods change projections,
which the attention interface of transformers does not reach.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fairseq_lowrank.huggingface.exported.configuration import LowrankConfig
from fairseq_lowrank.huggingface.exported.modeling import LowrankForCausalLM, LowrankForSeq2SeqLM
from fairseq_lowrank.huggingface.exported.tokenization import LowrankTokenizer

AutoConfig.register(LowrankConfig.model_type, LowrankConfig)
AutoModelForSeq2SeqLM.register(LowrankConfig, LowrankForSeq2SeqLM)
AutoModelForCausalLM.register(LowrankConfig, LowrankForCausalLM)
AutoTokenizer.register(LowrankConfig, slow_tokenizer_class=LowrankTokenizer)

__all__ = ["LowrankConfig", "LowrankForCausalLM", "LowrankForSeq2SeqLM", "LowrankTokenizer"]
