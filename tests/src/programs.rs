//! Where the programs of a cluster are.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The path of a program: from `PATH`, from where `./run setup` puts what it builds, or from where only root looks.
///
/// # Errors
/// When it is in none of these places.
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

/// What `./run` keeps between runs.
fn cache() -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
    Some(cache.join("tulle"))
}
