//! The certificates of a cluster. One CA signs server and client certificates. Another signs the client certificate
//! that the API server presents to aggregated APIs.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

/// The CA, and the directory of all files.
pub(super) struct Pki {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Subject<'a> {
    /// The Kubernetes user of a client.
    pub(super) common_name: &'a str,
    /// The Kubernetes group of a client.
    pub(super) organization: Option<&'a str>,
    /// The DNS names of a server.
    pub(super) names: &'a [&'a str],
    /// The addresses of a server.
    pub(super) addrs: &'a [IpAddr],
}

impl Pki {
    /// Creates a CA, `ca.crt` and `ca.key`, and the key pair for service account tokens, `sa.key` and `sa.pub`.
    pub(super) fn create(dir: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let tokens = KeyPair::generate()?;
        write(dir, "sa.key", &tokens.serialize_pem())?;
        write(dir, "sa.pub", &tokens.public_key_pem())?;
        Self::create_ca(dir, "ca", "kubernetes")
    }

    /// Creates a second CA, `front-proxy-ca`, and a certificate from it, `front-proxy-client`, with which the API
    /// server authenticates to aggregated APIs.
    pub(super) fn create_front_proxy(&self) -> anyhow::Result<()> {
        let common_name = "front-proxy-client";
        Self::create_ca(&self.dir, "front-proxy-ca", "front-proxy")?.issue(
            common_name,
            Subject {
                common_name,
                ..Subject::default()
            },
        )
    }

    fn create_ca(dir: &Path, file: &str, common_name: &str) -> anyhow::Result<Self> {
        let mut params = certificate_params(Subject {
            common_name,
            ..Subject::default()
        })?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = KeyPair::generate()?;
        write(dir, &format!("{file}.crt"), &params.self_signed(&key)?.pem())?;
        write(dir, &format!("{file}.key"), &key.serialize_pem())?;
        Ok(Self {
            dir: dir.to_owned(),
            issuer: Issuer::new(params, key),
        })
    }

    /// Creates `<name>.crt` and `<name>.key`, valid for servers and clients.
    pub(super) fn issue(&self, name: &str, subject: Subject<'_>) -> anyhow::Result<()> {
        let mut params = certificate_params(subject)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        write(&self.dir, &format!("{name}.crt"), &certificate.pem())?;
        write(&self.dir, &format!("{name}.key"), &key.serialize_pem())
    }
}

fn certificate_params(subject: Subject<'_>) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, subject.common_name);
    if let Some(organization) = subject.organization {
        params.distinguished_name.push(DnType::OrganizationName, organization);
    }
    for name in subject.names {
        params.subject_alt_names.push(SanType::DnsName((*name).try_into()?));
    }
    params
        .subject_alt_names
        .extend(subject.addrs.iter().copied().map(SanType::IpAddress));
    Ok(params)
}

fn write(dir: &Path, name: &str, pem: &str) -> anyhow::Result<()> {
    let path = dir.join(name);
    fs::write(&path, pem).with_context(|| format!("writing {}", path.display()))
}
