"""Published BERTs as checkpoints of fairseq, and the output of fine-tuned models for GLUE, SuperGLUE and SQuAD."""
