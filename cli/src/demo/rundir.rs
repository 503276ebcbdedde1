//! The directory of one run: manifests, credentials, logs, and the socket for `tulle demo break`.
//!
//! It is below `/tmp`, because the demo's processes run as several Unix users, some of which cannot enter a home directory.
//! Its name is the process id of the demo. If this process does not exist, the directory is left over from a demo that was killed.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, ensure};

/// The directory of a run. Dropping this value removes it, except for the logs of a failed run.
pub(super) struct RunDir {
    path: PathBuf,
    keep_logs: AtomicBool,
}

impl RunDir {
    /// Creates the directory of this process.
    pub(super) fn create() -> anyhow::Result<Self> {
        let base = base_directory();
        match fs::DirBuilder::new().mode(0o755).create(&base) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("creating the directory {}", base.display()));
            }
            _ => ensure_own_directory(&base)?,
        }
        create_public_directory(&base)?;
        let path = base.join(std::process::id().to_string());
        // An earlier process with the same id may have left its logs there.
        let _ = fs::remove_dir_all(&path);
        create_public_directory(&path)?;
        for part in [BIN, LOGS, MANIFESTS, CREDENTIALS] {
            create_public_directory(&path.join(part))?;
        }
        Ok(Self {
            path,
            keep_logs: AtomicBool::new(false),
        })
    }

    /// Removes the directories of killed runs of this user. With [`FailedRunLogs::Remove`], also removes the kept logs of failed
    /// runs that ended normally.
    pub(super) fn remove_stale_runs(failed_logs: FailedRunLogs) {
        for run in run_directories() {
            let is_stale = match run.join(FAILED_MARKER).exists() {
                true => failed_logs == FailedRunLogs::Remove,
                false => !is_alive(&run),
            };
            if is_stale {
                // A directory that cannot be removed is harmless.
                let _ = fs::remove_dir_all(&run);
            }
        }
    }

    /// Removes the common parent directory if it is empty.
    pub(super) fn remove_empty_base() {
        // This fails, as intended, if there are directories of other runs.
        let _ = fs::remove_dir(base_directory());
    }

    pub(super) fn bin(&self) -> PathBuf {
        self.path.join(BIN)
    }

    pub(super) fn logs(&self) -> PathBuf {
        self.path.join(LOGS)
    }

    pub(super) fn manifests(&self) -> PathBuf {
        self.path.join(MANIFESTS)
    }

    pub(super) fn credentials(&self) -> PathBuf {
        self.path.join(CREDENTIALS)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// Keeps the logs when the rest of the directory is removed.
    pub(super) fn keep_logs(&self) {
        self.keep_logs.store(true, Ordering::Relaxed);
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if !self.keep_logs.load(Ordering::Relaxed) {
            // The error cannot be reported here. The next demo cleans up again when it starts.
            let _ = fs::remove_dir_all(&self.path);
            Self::remove_empty_base();
            return;
        }
        for part in [BIN, MANIFESTS, CREDENTIALS] {
            let _ = fs::remove_dir_all(self.path.join(part));
        }
        let _ = fs::remove_file(self.socket());
        let _ = fs::write(self.path.join(FAILED_MARKER), "");
    }
}

/// Whether the logs of earlier failed runs are kept or removed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum FailedRunLogs {
    Keep,
    Remove,
}

/// The socket of the latest run that is still running.
pub(super) fn running_socket() -> Option<PathBuf> {
    let running = run_directories()
        .filter(|run| is_alive(run))
        .map(|run| run.join(SOCKET));
    let modified_at = |path: &PathBuf| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    running.filter(|path| path.exists()).max_by_key(modified_at)
}

/// Gives a file to a user. Its mode stays the same: 0600 for secrets.
pub(super) fn give_to_user(path: &Path, uid: u32) -> anyhow::Result<()> {
    chown(path, Some(uid), Some(uid)).with_context(|| format!("changing the owner of {} to user {uid}", path.display()))
}

/// Creates a directory that all users can enter and read, whatever the umask is.
pub(super) fn create_public_directory(path: &Path) -> anyhow::Result<()> {
    let result = match fs::DirBuilder::new().mode(0o755).create(path) {
        Err(err) if err.kind() != io::ErrorKind::AlreadyExists => Err(err),
        _ => fs::set_permissions(path, fs::Permissions::from_mode(0o755)),
    };
    result.with_context(|| format!("creating the directory {}", path.display()))
}

/// Fails if the path is not a directory or belongs to another user, because all users can write to `/tmp`.
///
/// Only the owner of a directory in `/tmp` can replace it, so the directory can be trusted after this check.
fn ensure_own_directory(path: &Path) -> anyhow::Result<()> {
    let found = fs::symlink_metadata(path).with_context(|| format!("reading the metadata of {}", path.display()))?;
    ensure!(
        found.is_dir(),
        "{} is a link or a file, and not a directory; remove it",
        path.display()
    );
    let owner = found.uid();
    ensure!(
        owner == nix::unistd::geteuid().as_raw(),
        "{} belongs to user {owner}, not to you; remove it",
        path.display()
    );
    Ok(())
}

fn run_directories() -> impl Iterator<Item = PathBuf> {
    let base = base_directory();
    let entries = ensure_own_directory(&base).ok().and_then(|()| fs::read_dir(base).ok());
    let entries = entries.into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir())
}

/// Whether the process of the run exists. If another process has the same id now, the directory is kept although the run has ended.
fn is_alive(run: &Path) -> bool {
    let pid = run.file_name().unwrap_or_default();
    Path::new("/proc").join(pid).exists()
}

fn base_directory() -> PathBuf {
    Path::new("/tmp").join(format!("tulle-demo-{}", outer_uid()))
}

/// The user id outside the demo's user namespace. The path contains this id, so that `tulle demo break`, which runs outside,
/// finds the same directory.
fn outer_uid() -> u32 {
    let uid = nix::unistd::geteuid().as_raw();
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let outside = map.lines().find_map(|line| {
        let fields: Vec<u32> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        match fields[..] {
            [inside, outside, count] if uid.checked_sub(inside).is_some_and(|at| at < count) => {
                outside.checked_add(uid - inside)
            }
            _ => None,
        }
    });
    outside.unwrap_or(uid)
}

const BIN: &str = "bin";
const LOGS: &str = "logs";
const MANIFESTS: &str = "manifests";
const CREDENTIALS: &str = "credentials";
const SOCKET: &str = "socket";
/// Marks a failed run that has ended and whose logs are kept.
const FAILED_MARKER: &str = "failed";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_place_of_the_directory_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let (own, link) = (temporary.path().join("own"), temporary.path().join("link"));
        fs::create_dir(&own).unwrap();
        std::os::unix::fs::symlink(&own, &link).unwrap();
        ensure_own_directory(&own).unwrap();
        let refused = ensure_own_directory(&link).unwrap_err().to_string();
        assert!(refused.contains("and not a directory"), "{refused}");
        if nix::unistd::geteuid().is_root() {
            chown(&own, Some(1000), None).unwrap();
            let refused = ensure_own_directory(&own).unwrap_err().to_string();
            assert!(refused.contains("belongs to user 1000"), "{refused}");
        }
    }
}
