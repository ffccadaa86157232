"""Train CLAP audio-text models with DeepSpeed ZeRO. Importing this imports neither torch nor deepspeed."""

__version__ = "0.1.0"
