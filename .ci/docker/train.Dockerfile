# Training on CUDA, with SGLang in an environment of its own: docker build -f .ci/docker/train.Dockerfile -t mtrl-train .
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# A compiler and the headers of Python are for kernels that Triton and SGLang compile when they start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev python3-venv g++ ninja-build bubblewrap \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --no-cache-dir sglang==0.5.23 sglang-router==0.3.2
COPY pyproject.toml README.md LICENSE /src/
COPY gateway /src/gateway
COPY mtrl_plugins /src/mtrl_plugins
COPY trainer /src/trainer
RUN python3 -m venv /opt/mtrl && /opt/mtrl/bin/pip install --no-cache-dir '/src[train,lora]' 'torch>=2.13'
ENV PATH=/opt/mtrl/bin:$PATH MTRL_SGLANG_PYTHON=/opt/sglang/bin/python
WORKDIR /workspace
ENTRYPOINT ["mtrl-train"]
CMD ["--help"]
