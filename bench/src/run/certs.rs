//! Certificates of one run: a certificate authority, and a leaf certificate for each side.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

/// Paths of the PEM files.
pub(super) struct CertificateFiles {
    pub(super) anchors: PathBuf,
    /// Certificate and key in one file, the format that HAProxy requires.
    pub(super) client: PathBuf,
    pub(super) server: PathBuf,
}

/// Creates all certificates in `dir`, with P-256 keys as in the mesh.
pub(super) fn create(dir: &Path) -> anyhow::Result<CertificateFiles> {
    let key = KeyPair::generate().context("creating the key of the certificate authority")?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "root.bench");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let root = params.self_signed(&key).context("signing the certificate authority")?;
    let issuer = Issuer::new(params, key);
    let files = CertificateFiles {
        anchors: dir.join("anchors.pem"),
        client: dir.join("client.pem"),
        server: dir.join("server.pem"),
    };
    write(&files.anchors, &root.pem())?;
    write(&files.client, &create_leaf("client.bench", &issuer)?)?;
    write(&files.server, &create_leaf("server.bench", &issuer)?)?;
    Ok(files)
}

fn create_leaf(name: &str, issuer: &Issuer<'_, KeyPair>) -> anyhow::Result<String> {
    let key = KeyPair::generate().with_context(|| format!("creating the key of {name}"))?;
    let mut params =
        CertificateParams::new([name.to_owned()]).with_context(|| format!("using {name} as a certificate name"))?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = params
        .signed_by(&key, issuer)
        .with_context(|| format!("signing {name}"))?;
    Ok(format!("{}{}", certificate.pem(), key.serialize_pem()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
