# CPU:          docker build -t bert-jax .
# NVIDIA GPUs:  docker build -t bert-jax:cuda --build-arg EXTRAS=cuda13 .
#               (CUDA and cuDNN come from PyPI; the host needs its driver and the NVIDIA Container Toolkit)
# Run:          docker run --rm -it -v "$PWD:/work" bert-jax pretrain --output_dir runs/first
#               (for the GPU image with --gpus all)
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# Extras of the package, with commas between several: cuda12, cuda13, tpu, onnx, text, wandb, mlflow.
ARG EXTRAS=""

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY bert bert
COPY configs configs
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".${EXTRAS:+[${EXTRAS}]}"

# Read by the NVIDIA Container Toolkit, and by nothing else.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Data sets, vocabularies and compiled programs are cached in the home; mount a volume there to keep them.
RUN useradd --create-home --uid 1000 bert
USER 1000
WORKDIR /work
ENTRYPOINT ["bert"]
CMD ["--help"]
