# The images for users: docker build --target controller .   docker build --target proxy .
# docker build --target bench . is the workload of the documentation. They are for the architecture that builds them (amd64, arm64).
# The proxy in them is built without a profile of its load; `./run images` builds it with one, and needs no daemon.

FROM rust:1.95-bookworm AS build
COPY . /tulle
WORKDIR /tulle
RUN ./run images-root /out

FROM scratch AS controller
COPY --from=build /out/controller /
USER 2103
ENTRYPOINT ["/tulle-control"]

FROM scratch AS proxy
COPY --from=build /out/proxy /
ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin
USER 2102
ENTRYPOINT ["/usr/lib/linkerd/linkerd2-proxy-identity"]

FROM scratch AS bench
COPY --from=build /out/bench /
USER 65534
ENTRYPOINT ["/tulle-bench"]
