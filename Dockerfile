# SPDX-License-Identifier: Apache-2.0
# SuGaR on a CPU:  docker build -t sugar . && docker run --rm -v "$PWD:/scenes" sugar run -s my_scan
# With --build-arg PIP_EXTRA_INDEX_URL=... of PyTorch's CPU wheels the image is some gigabytes smaller.
FROM python:3.12-slim-bookworm

# What Open3D loads, and the compiler's library that torch uses.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        libegl1 libgl1 libgomp1 libidn2-0 libusb-1.0-0 \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL=
WORKDIR /opt/sugar
COPY requirements.txt requirements-torch.txt requirements-without-torch.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
RUN pip install --no-cache-dir ".[heic,usd,print,geo]"

RUN useradd --create-home --uid 1000 sugar
USER sugar
VOLUME /scenes
WORKDIR /scenes
ENTRYPOINT ["sugar"]
CMD ["--help"]
