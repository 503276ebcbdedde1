//! Paths of third-party programs, and of the binaries of this build.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// The path of a program: on the `PATH`, in the directory of programs that `./run setup` builds, or in `/usr/sbin` or `/sbin`.
///
/// # Errors
/// Fails if the program is in none of these places.
pub fn find(program: &str) -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let built = cache().map(|cache| cache.join("bin"));
    std::env::split_paths(&path)
        .chain(built.clone())
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
        .with_context(|| {
            let built = built.as_deref().unwrap_or_else(|| Path::new("~/.cache/tulle/bin"));
            format!(
                "{program} is neither on the PATH nor in {}; `./run setup` installs it",
                built.display()
            )
        })
}

/// The value of `PATH` with the directories where [`find`] looks.
pub fn search_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    let built = cache().map(|cache| format!(":{}", cache.join("bin").display()));
    format!("{path}{}:/usr/sbin:/sbin", built.unwrap_or_default())
}

/// The path of a binary of this build.
///
/// # Errors
/// Fails if the binary is not built.
pub fn built_binary(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("the path of this program")?;
    // Cargo puts tests into `<profile>/deps`.
    let profile = own.ancestors().nth(2).context("the directory of the build")?;
    let path = profile.join(name);
    ensure!(
        path.is_file(),
        "{} is missing; `cargo build --workspace --bins`, with the profile of this test, builds it",
        path.display()
    );
    Ok(path)
}

/// The directory where `./run test` and `./run cluster` build the static binaries for images: below the target
/// directory of this program.
///
/// # Errors
/// Fails if the binaries are not built.
pub fn static_binaries_dir() -> anyhow::Result<PathBuf> {
    let own_path = std::env::current_exe().context("the path of this program")?;
    let built = format!("{}-unknown-linux-gnu/quick", std::env::consts::ARCH);
    let dir = own_path
        .ancestors()
        .map(|dir| dir.join(&built))
        .find(|dir| dir.is_dir());
    dir.with_context(|| format!("no {built} above {}; `./run test` builds it", own_path.display()))
}

/// The directory where `./run test` and `./run stateful` lay out the files of an image with servers.
///
/// # Errors
/// Fails if they have not done so.
pub fn servers_dir(image: &str) -> anyhow::Result<PathBuf> {
    let dir = cache().map(|cache| cache.join("servers").join(image));
    dir.filter(|dir| dir.is_dir())
        .with_context(|| format!("the files of the image {image} are missing; `./run stateful` lays them out"))
}

/// Copies a binary of this build to a directory where the proxy's user can start it. That user may have no access to
/// the build directory.
///
/// # Errors
/// Fails if the binary is not built, or cannot be copied.
pub fn install(name: &str, into: &Path) -> anyhow::Result<PathBuf> {
    let (from, to) = (built_binary(name)?, into.join(name));
    fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop))?;
    Ok(to)
}

/// The cache directory of `./run`.
fn cache() -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
    Some(cache.join("tulle"))
}
