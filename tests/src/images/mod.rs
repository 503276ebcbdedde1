//! Images as docker archives, built without a daemon and without a registry.
//!
//! The `Dockerfile` describes the images for users and `images/roots` creates their root file systems. The tests load the same
//! files with the same settings. The same input gives the same bytes, except for the certificate in [`Image::Echo`].

mod archive;
mod dockerfile;
mod settings;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use self::settings::Settings;
use crate::programs;

/// An image of this repository.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Image {
    /// The control plane.
    Controller,
    /// The injected containers: proxy, init, validator.
    Proxy,
    /// `tulle-bench`: clients and servers without code for the mesh.
    Bench,
    /// [`Self::Bench`] for tests: it has a shell with the usual programs, and curl.
    Workload,
    /// The DNS server of the cluster.
    CoreDns,
    /// The container that holds a pod's namespaces.
    Pause,
    /// The workload of the conformance tests of the Gateway API.
    Echo,
    /// PostgreSQL, MariaDB, Redis and memcached, with their clients and a shell.
    Databases,
    /// Brokers, stores that elect leaders and other servers, with their clients and a shell.
    Brokers,
}

impl Image {
    /// The images that the manifests of this repository use in test clusters.
    pub const DEFAULT: [Self; 3] = [Self::Controller, Self::Proxy, Self::Workload];
    /// The images for users: the final stages of the `Dockerfile`.
    pub const SHIPPED: [Self; 3] = [Self::Controller, Self::Proxy, Self::Bench];

    /// The reference of the image in manifests.
    pub fn reference(self) -> String {
        match self {
            Self::Controller => format!("ghcr.io/tulle-mesh/controller:{VERSION}"),
            Self::Proxy => format!("ghcr.io/tulle-mesh/proxy:{VERSION}"),
            Self::Bench | Self::Workload => format!("ghcr.io/tulle-mesh/bench:{VERSION}"),
            Self::CoreDns => "tulle.test/coredns:latest".to_owned(),
            Self::Pause => "tulle.test/pause:local".to_owned(),
            Self::Echo => ECHO.to_owned(),
            Self::Databases => "tulle.test/databases:latest".to_owned(),
            Self::Brokers => "tulle.test/brokers:latest".to_owned(),
        }
    }
}

/// Writes the archive of an image, with static binaries from a directory.
///
/// # Errors
/// Fails if the binaries are not built, or a program of the image is not installed.
pub fn write(image: Image, binaries: &Path, archive: &Path) -> anyhow::Result<()> {
    let root = tempfile::tempdir().context("creating a directory")?;
    let root = root.path();
    let entrypoint = |path: &str| Settings {
        entrypoint: vec![path.to_owned()],
        env: vec!["PATH=/bin".to_owned()],
        ..Settings::default()
    };
    let settings = match image {
        Image::Controller => return write_shipped(image, "controller", binaries, root, archive),
        Image::Proxy => return write_shipped(image, "proxy", binaries, root, archive),
        Image::Bench => return write_shipped(image, "bench", binaries, root, archive),
        Image::Databases => return write_servers(image, "databases", archive),
        Image::Brokers => return write_servers(image, "brokers", archive),
        Image::Workload => {
            copy_file(&binaries.join("tulle-bench"), &root.join("tulle-bench"))?;
            busybox(root)?;
            copy_with_libraries(Path::new("/usr/bin/curl"), &root.join("bin/curl"), root)?;
            entrypoint("/tulle-bench")
        }
        Image::CoreDns => {
            copy_file(&programs::find("coredns")?, &root.join("coredns"))?;
            entrypoint("/coredns")
        }
        Image::Pause => {
            busybox(root)?;
            // Ends at SIGTERM like Kubernetes' own image. As process 1, `sleep` alone would ignore it until its pod is killed.
            let run = "trap 'exit 0' TERM; sleep infinity & wait";
            Settings {
                entrypoint: ["/bin/sh", "-c", run].map(str::to_owned).to_vec(),
                ..entrypoint("")
            }
        }
        Image::Echo => {
            for program in ["client", "server"] {
                copy_file(&binaries.join(program), &root.join("bin").join(program))?;
            }
            let certificate =
                rcgen::generate_simple_self_signed(["echo".to_owned()]).context("creating a certificate")?;
            fs::write(root.join("cert.crt"), certificate.cert.pem()).context("writing a certificate")?;
            fs::write(root.join("cert.key"), certificate.signing_key.serialize_pem()).context("writing a key")?;
            Settings {
                user: "1338".to_owned(),
                ..entrypoint("/bin/server")
            }
        }
    };
    archive::write(root, &image.reference(), &settings, archive)
}

/// The reference of the image in an archive.
///
/// # Errors
/// Fails if the file is not a docker archive.
pub fn archive_reference(archive: &Path) -> anyhow::Result<String> {
    archive::reference(archive).with_context(|| format!("reading {}", archive.display()))
}

/// Writes an image with the settings of its stage in the `Dockerfile`, and the version of this build.
fn write_shipped(image: Image, stage: &str, binaries: &Path, root: &Path, archive: &Path) -> anyhow::Result<()> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(repository.join("Dockerfile")).context("reading the Dockerfile")?;
    let mut settings = dockerfile::settings(&text, stage)?;
    let version = "org.opencontainers.image.version".to_owned();
    settings.labels.insert(version, VERSION.to_owned());
    let output = Command::new(repository.join("images/roots"))
        .arg(binaries)
        .arg(root)
        .output()
        .context("starting images/roots")?;
    let answer = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "images/roots: {}", answer.trim());
    archive::write(&root.join(stage), &image.reference(), &settings, archive)
}

/// Writes an image with files that `tests/stateful/task.sh` has laid out from packages.
fn write_servers(image: Image, name: &str, archive: &Path) -> anyhow::Result<()> {
    let settings = Settings {
        entrypoint: vec!["/bin/bash".to_owned()],
        env: vec!["PATH=/usr/sbin:/usr/bin".to_owned(), "LANG=C.UTF-8".to_owned()],
        ..Settings::default()
    };
    archive::write(&programs::servers_dir(name)?, &image.reference(), &settings, archive)
}

/// Adds a shell and the usual programs to `/bin`.
fn busybox(root: &Path) -> anyhow::Result<()> {
    let program = Path::new("/bin/busybox");
    let list = Command::new(program).arg("--list").output();
    let list = list.context("starting /bin/busybox (package busybox)")?;
    // The dynamic build, because the static one crashes when it resolves a name.
    copy_with_libraries(program, &root.join("bin/busybox"), root)?;
    for name in String::from_utf8(list.stdout)?
        .lines()
        .filter(|name| *name != "busybox")
    {
        symlink("busybox", root.join("bin").join(name)).with_context(|| format!("linking {name}"))?;
    }
    Ok(())
}

/// Copies a program with its libraries and its loader.
fn copy_with_libraries(program: &Path, to: &Path, root: &Path) -> anyhow::Result<()> {
    copy_file(program, to)?;
    let list = Command::new("ldd").arg(program).output().context("starting ldd")?;
    for library in String::from_utf8(list.stdout)?
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        copy_file(Path::new(library), &root.join(library.trim_start_matches('/')))?;
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> anyhow::Result<()> {
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o555)).context("setting a mode")?;
    Ok(())
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The image that the manifests of the conformance tests name. They run `client` in it, and name its certificate and key.
const ECHO: &str = "gcr.io/k8s-staging-gateway-api/echo-advanced:v20240412-v1.0.0-394-g40c666fd";
