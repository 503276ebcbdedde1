//! Compiles the echo service without `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/echo.proto");
    let files = protox::compile(["echo.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .build_client(false)
        .build_transport(false)
        .compile_fds(files)?;
    Ok(())
}
