//! Generates messages, clients and servers from `proto/`; protox parses the files, so `protoc` is not needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = [
        "destination",
        "grpc_route",
        "health",
        "http_route",
        "http_types",
        "identity",
        "inbound",
        "meta",
        "net",
        "opaque_route",
        "outbound",
        "tap",
        "tls_route",
        "trace",
        "transport",
        "workload",
    ];
    let files = files.map(|name| format!("proto/{name}.proto"));
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    // Ordered maps make the encoding deterministic: equal messages have equal bytes, and labels have the same order
    // everywhere.
    tonic_prost_build::configure()
        .btree_map(".")
        .codec_path("crate::codec::Codec")
        .compile_fds(descriptors)?;
    Ok(())
}
