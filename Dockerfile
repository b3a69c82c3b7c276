# A worker on the CPU. Build: docker build -t headrace .   Run: see compose.yaml and docs/operations.md.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# Where torch comes from: the build for CPUs, without gigabytes of CUDA libraries.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH
WORKDIR /src
# First what seldom changes, so that a change of code does not install torch again.
COPY constraints/cpu.txt constraints/cpu.txt
RUN pip install --no-deps --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints/cpu.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY assets/demo-model assets/demo-model
COPY clients clients
COPY engine engine
COPY kernels kernels
COPY worker worker
RUN pip install --constraint constraints/cpu.txt ".[worker]"
# The kernels for CPUs, for every kind of x86 processor: the image needs no compiler, and its first start does not wait.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && python -m headrace.kernels.cpu.prebuilt

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --create-home headrace \
    && install --directory --owner headrace --group headrace /var/cache/headrace
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/headrace/hub \
    HEADRACE_CACHE_DIR=/var/cache/headrace
USER headrace
WORKDIR /home/headrace
VOLUME /var/cache/headrace
# Looks at the worker's own sign of life, which is written only while its step loop moves.
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 CMD ["headrace", "health"]
ENTRYPOINT ["headrace"]
CMD ["worker"]
