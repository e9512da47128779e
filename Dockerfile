# farspan with the versions that constraints.txt pins, and its allocator.
#
#   docker build --tag farspan:cpu --target cpu .
#   docker build --tag farspan:cuda --target cuda .
#   docker run --rm farspan:cpu plan --model Qwen2.5-7B --context 1M --machine h200
#   docker run --rm --gpus all --volume "$PWD:/work" farspan:cuda train run.yaml
#
# pip's torch for Linux on x86_64 brings CUDA's libraries and runs without a GPU as well. For a smaller image
# give pip's arguments for a build without them: --build-arg TORCH="torch --index-url ...".

FROM python:3.12-slim-bookworm AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
COPY . /farspan
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels \
    /farspan /farspan/packages/farspan-memory

FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS cuda
# Triton compiles its launchers, and farspan what turns the allocator's errors into PyTorch's.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/farspan
ENV PATH=/opt/farspan/bin:$PATH
ARG TORCH=torch
COPY constraints.txt /
RUN pip install --no-cache-dir --constraint /constraints.txt ${TORCH}
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --constraint /constraints.txt \
    /wheels/farspan_memory-*.whl \
    "farspan[allocator,quantize,tensorboard] @ file://$(echo /wheels/farspan-*.whl)"
WORKDIR /work
ENTRYPOINT ["farspan"]

FROM python:3.12-slim-bookworm AS cpu
ARG TORCH=torch
COPY constraints.txt /
RUN pip install --no-cache-dir --constraint /constraints.txt ${TORCH}
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --constraint /constraints.txt \
    /wheels/farspan_memory-*.whl \
    "farspan[allocator,lora,tensorboard] @ file://$(echo /wheels/farspan-*.whl)"
WORKDIR /work
ENTRYPOINT ["farspan"]
