# CPU:          docker build -t bert-jax .
# NVIDIA GPUs:  docker build -t bert-jax:cuda --build-arg EXTRAS=cuda13 .
#               (CUDA and cuDNN come from PyPI; the host needs its driver and the NVIDIA Container Toolkit)
# A server:     docker build -t bert-serve --target serve .   (docs/serve.md)
# Run:          docker run --rm -it -v "$PWD:/work" bert-jax pretrain --output_dir runs/first
#               (for the GPU image with --gpus all)
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS package

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

FROM package AS serve
USER root
# hadolint ignore=DL3013
RUN cd /src && pip install --no-cache-dir ".[serve,onnx]"
USER 1000
EXPOSE 8080
ENTRYPOINT ["bert", "serve", "--host", "0.0.0.0", "--engine", "onnxruntime"]

# The target without --target.
FROM package
