//! Docker archives: one tar file with a layer, its image configuration and a manifest of both.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use aws_lc_rs::digest::{SHA256, digest};
use serde_json::json;
use tar::{Archive, Builder, EntryType, Header};

use super::settings::Settings;

/// Writes the files below `root` as an image with one layer.
///
/// The owner of all files is root, modification times are zero, and file capabilities are kept.
pub(super) fn write(root: &Path, reference: &str, settings: &Settings, archive: &Path) -> anyhow::Result<()> {
    let layer = layer(root)?;
    let layer_digest = sha256(&layer);
    let config = json!({
        "architecture": match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        },
        "os": "linux",
        "config": {
            "Entrypoint": settings.entrypoint,
            "Env": settings.env,
            "Labels": settings.labels,
            "User": settings.user,
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
    })
    .to_string();
    let config_file = format!("{}.json", sha256(config.as_bytes()));
    let layer_file = format!("{layer_digest}/layer.tar");
    let manifest = json!([{"Config": config_file, "RepoTags": [reference], "Layers": [layer_file]}]).to_string();

    let file = File::create(archive).with_context(|| format!("creating {}", archive.display()))?;
    let mut tar = Builder::new(BufWriter::new(file));
    for (name, content) in [
        (config_file.as_str(), config.as_bytes()),
        (&layer_file, &layer),
        ("manifest.json", manifest.as_bytes()),
    ] {
        let mut header = header(EntryType::Regular, 0o444);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, content)?;
    }
    tar.into_inner()?
        .flush()
        .with_context(|| format!("writing {}", archive.display()))
}

/// The reference of the first image in an archive.
pub(super) fn reference(archive: &Path) -> anyhow::Result<String> {
    let mut tar = Archive::new(File::open(archive)?);
    for entry in tar.entries()? {
        let entry = entry?;
        if entry.path()?.ends_with("manifest.json") {
            let manifest: serde_json::Value = serde_json::from_reader(entry)?;
            let reference = manifest[0]["RepoTags"][0].as_str();
            return reference
                .map(str::to_owned)
                .context("the image in the archive has no reference");
        }
    }
    bail!("the archive contains no manifest.json")
}

fn layer(root: &Path) -> anyhow::Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for path in files_below(root)? {
        let name = path.strip_prefix(root)?;
        let what = || format!("packing {}", path.display());
        let about = fs::symlink_metadata(&path).with_context(what)?;
        if about.is_symlink() {
            let target = fs::read_link(&path).with_context(what)?;
            tar.append_link(&mut header(EntryType::Symlink, 0o777), name, target)
                .with_context(what)?;
        } else if about.is_dir() {
            let mut header = header(EntryType::Directory, 0o755);
            tar.append_data(&mut header, name, std::io::empty())
                .with_context(what)?;
        } else {
            if let Some(capabilities) = xattr::get(&path, CAPABILITY).with_context(what)? {
                let record = format!("SCHILY.xattr.{CAPABILITY}");
                tar.append_pax_extensions([(record.as_str(), capabilities.as_slice())])
                    .with_context(what)?;
            }
            let content = fs::read(&path).with_context(what)?;
            let mut header = header(EntryType::Regular, about.mode() & 0o777);
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, name, content.as_slice())
                .with_context(what)?;
        }
    }
    Ok(tar.into_inner()?)
}

/// The files and directories below a directory, sorted by path, so that a directory precedes its contents.
fn files_below(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                pending.push(path.clone());
            }
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(0);
    header
}

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes)
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The extended attribute of a file's capabilities.
const CAPABILITY: &str = "security.capability";
