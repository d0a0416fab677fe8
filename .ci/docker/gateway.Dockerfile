# The gateway with the shipped tools: docker build -f .ci/docker/gateway.Dockerfile -t mtrl-gateway .
FROM python:3.11-slim
WORKDIR /srv
# Confines programs that a policy writes.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY mtrl_plugins mtrl_plugins
COPY trainer trainer
RUN pip install --no-cache-dir .
# Your own tools replace these two.
COPY mcp_servers.json .
COPY tool_configs tool_configs
# nobody, as a number, which Kubernetes can check.
USER 65534
EXPOSE 8765
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8765/healthz', timeout=5)"]
CMD ["mtrl-gateway", "serve", "--host", "0.0.0.0", "--token-file", "/run/secrets/mtrl-token"]
