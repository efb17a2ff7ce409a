# Rillflow with Ray, for a processor or for NVIDIA GPUs; the CUDA libraries come with torch's packages.
#   docker build -t rillflow .                                     on processors
#   docker build -t rillflow --build-arg TORCH=cu130 .             on GPUs: a build of download.pytorch.org/whl
#   docker run --gpus all --shm-size 16g -v "$PWD/runs:/runs" rillflow run /runs/run.toml --dir /runs/first
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH=cpu
ARG EXTRAS=gym,parquet,quant,ray

# KubeRay's probes call wget; Ray lists processes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends procps wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rillflow
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" "torch>=2.10,<=2.13.0"

COPY pyproject.toml README.md LICENSE ./
COPY rillflow rillflow
COPY rillflow_parts rillflow_parts
COPY plugins/planner plugins/planner
RUN grep -v -i -E '^(torch|triton|nvidia)' constraints.txt > others.txt \
    && pip install --no-cache-dir -c others.txt ".[${EXTRAS}]" ./plugins/planner

RUN useradd --create-home --uid 1000 rillflow && mkdir /runs && chown rillflow /runs
USER rillflow
WORKDIR /runs
ENTRYPOINT ["rillflow"]
CMD ["doctor"]
