//! Images as docker archives, made without a daemon and without a registry.
//!
//! What users get is described by the `Dockerfile` and laid out by `images/roots`; the tests load the same files with the
//! same settings. The same input gives the same bytes.

mod archive;
mod dockerfile;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::programs;

/// An image of this repository.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Image {
    /// The control plane.
    Controller,
    /// What is injected: proxy, init, validator.
    Proxy,
    /// `tulle-bench`: clients and servers that know nothing of the mesh. Beside what the `Dockerfile` says it has a
    /// shell with the usual programs, for tests.
    Workload,
    /// The cluster's name server.
    CoreDns,
    /// What holds a pod's namespaces.
    Pause,
}

/// What an archive says about its image beside its files.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Settings {
    pub(crate) entrypoint: Vec<String>,
    pub(crate) env: Vec<String>,
    pub(crate) user: String,
}

impl Image {
    /// Those that this repository's manifests name.
    pub const ALL: [Self; 3] = [Self::Controller, Self::Proxy, Self::Workload];

    /// The reference that manifests name it by.
    pub fn reference(self) -> String {
        match self {
            Self::Controller => format!("ghcr.io/tulle-mesh/controller:{VERSION}"),
            Self::Proxy => format!("ghcr.io/tulle-mesh/proxy:{VERSION}"),
            Self::Workload => format!("ghcr.io/tulle-mesh/bench:{VERSION}"),
            Self::CoreDns => "tulle.test/coredns:latest".to_owned(),
            Self::Pause => "tulle.test/pause:latest".to_owned(),
        }
    }
}

/// Writes the archive of an image, with the static binaries that are in a directory.
///
/// # Errors
/// When the binaries were not built, or a program that goes in is not installed.
pub fn write(image: Image, binaries: &Path, archive: &Path) -> anyhow::Result<()> {
    let root = tempfile::tempdir().context("creating a directory")?;
    let root = root.path();
    let entrypoint = |path: &str| Settings {
        entrypoint: vec![path.to_owned()],
        env: vec!["PATH=/bin".to_owned()],
        user: String::new(),
    };
    let settings = match image {
        Image::Controller => return write_shipped(image, "controller", binaries, root, archive),
        Image::Proxy => return write_shipped(image, "proxy", binaries, root, archive),
        Image::Workload => {
            put(&binaries.join("tulle-bench"), &root.join("tulle-bench"))?;
            busybox(root)?;
            put_linked(Path::new("/usr/bin/curl"), &root.join("bin/curl"), root)?;
            entrypoint("/tulle-bench")
        }
        Image::CoreDns => {
            put(&programs::find("coredns")?, &root.join("coredns"))?;
            entrypoint("/coredns")
        }
        Image::Pause => {
            busybox(root)?;
            Settings {
                entrypoint: ["/bin/sleep", "infinity"].map(str::to_owned).to_vec(),
                ..entrypoint("")
            }
        }
    };
    archive::write(root, &image.reference(), &settings, archive)
}

/// The reference of the image in an archive.
///
/// # Errors
/// When it is no docker archive.
pub fn reference_of(archive: &Path) -> anyhow::Result<String> {
    archive::reference(archive).with_context(|| format!("reading {}", archive.display()))
}

/// An image of the `Dockerfile`.
fn write_shipped(image: Image, stage: &str, binaries: &Path, root: &Path, archive: &Path) -> anyhow::Result<()> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(repository.join("Dockerfile")).context("reading the Dockerfile")?;
    let settings = dockerfile::settings(&text, stage)?;
    let output = Command::new(repository.join("images/roots"))
        .arg(binaries)
        .arg(root)
        .output()
        .context("starting images/roots")?;
    let answer = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "images/roots: {}", answer.trim());
    archive::write(&root.join(stage), &image.reference(), &settings, archive)
}

/// A shell and its like in `/bin`.
fn busybox(root: &Path) -> anyhow::Result<()> {
    let program = Path::new("/bin/busybox");
    let list = Command::new(program).arg("--list").output();
    let list = list.context("starting /bin/busybox (package busybox)")?;
    // Not the static one, which crashes when it looks up a name.
    put_linked(program, &root.join("bin/busybox"), root)?;
    for name in String::from_utf8(list.stdout)?
        .lines()
        .filter(|name| *name != "busybox")
    {
        symlink("busybox", root.join("bin").join(name)).with_context(|| format!("linking {name}"))?;
    }
    Ok(())
}

/// Copies a program with the libraries and the loader that it needs.
fn put_linked(program: &Path, to: &Path, root: &Path) -> anyhow::Result<()> {
    put(program, to)?;
    let list = Command::new("ldd").arg(program).output().context("starting ldd")?;
    for library in String::from_utf8(list.stdout)?
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        put(Path::new(library), &root.join(library.trim_start_matches('/')))?;
    }
    Ok(())
}

fn put(from: &Path, to: &Path) -> anyhow::Result<()> {
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o555)).context("setting a mode")?;
    Ok(())
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
