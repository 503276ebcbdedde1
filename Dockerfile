# The images for users: docker build --target controller .   docker build --target proxy .
# docker build --target bench . builds the workload of the documentation. Images are for the building machine's architecture
# (amd64, arm64).
# Their proxy is built without profile-guided optimisation; `./run images` builds it with a profile, and needs no daemon.

# Pinned by digest, because a tag can move. CI builds in this image, too (.github/workflows).
FROM rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1 AS build
COPY . /tulle
WORKDIR /tulle
RUN ./run images-root /out

FROM scratch AS controller
LABEL org.opencontainers.image.title="tulle control plane"
LABEL org.opencontainers.image.source=https://github.com/tulle-mesh/tulle
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /out/controller /
USER 2103
ENTRYPOINT ["/tulle-control"]

FROM scratch AS proxy
LABEL org.opencontainers.image.title="tulle proxy, init and network validator"
LABEL org.opencontainers.image.source=https://github.com/tulle-mesh/tulle
LABEL org.opencontainers.image.licenses="Apache-2.0 AND GPL-2.0-or-later AND GPL-3.0-or-later AND LGPL-2.1-or-later"
COPY --from=build /out/proxy /
ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin
USER 2102
ENTRYPOINT ["/usr/lib/linkerd/linkerd2-proxy-identity"]

FROM scratch AS bench
LABEL org.opencontainers.image.title="tulle-bench, servers and clients that know nothing of a mesh"
LABEL org.opencontainers.image.source=https://github.com/tulle-mesh/tulle
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /out/bench /
USER 65534
ENTRYPOINT ["/tulle-bench"]
