"""oktopk inside other frameworks: two lines of a script, and their own checkpoints have the state of every rank.

    lightning    OkTopkStrategy, for a Trainer of Lightning
    huggingface  OkTopkCallback, for a Trainer of transformers
    accelerate   register(), for a model that Accelerate has prepared
    ray          register() and report(), for the training function of Ray Train
    wandb        WandbSink, metrics in a run of Weights & Biases
    mlflow       MlflowSink, metrics in a run of MLflow

Each module imports its framework, and nothing else imports these modules: `pip install 'oktopk[lightning]'`.
"""
