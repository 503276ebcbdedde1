use super::*;

fn identities(names: &[&str], suffixes: Vec<IdentitySuffix>) -> Authentication {
    Authentication::TlsIdentities {
        identities: names.iter().map(|name| (*name).into()).collect(),
        suffixes,
    }
}

fn from(net: &str, except: &str, authentication: Authentication) -> Authorization {
    let except = tulle_core::nets::parse_networks(except).unwrap();
    Authorization {
        networks: vec![NetworkMatch {
            net: net.parse().unwrap(),
            except,
        }],
        authentication,
        meta: Meta::default_named(net),
    }
}

fn check(authorizations: &[Authorization], client: &str, tls: ConnTls<'_>) -> Result<String, Denied> {
    authorize(authorizations, client.parse().unwrap(), tls).map(|found| found.meta.name().to_owned())
}

#[test]
fn networks_and_their_exceptions_decide_first() {
    let open = [from("10.0.0.0/8", "10.1.0.0/16", Authentication::Unauthenticated)];
    for (client, expected) in [
        ("10.0.0.1", Ok("10.0.0.0/8".to_owned())),
        ("::ffff:10.0.0.1", Ok("10.0.0.0/8".to_owned())),
        ("10.1.0.1", Err(Denied::Network)),
        ("192.168.0.1", Err(Denied::Network)),
        ("fd00::1", Err(Denied::Network)),
    ] {
        assert_eq!(check(&open, client, ConnTls::NotTerminated), expected, "{client}");
    }
}

#[test]
fn authentication_decides_next() {
    let dns: Identity = "web.shop.serviceaccount.identity.linkerd.cluster.local"
        .parse()
        .unwrap();
    let uri: Identity = "spiffe://root.test/shop/web".parse().unwrap();
    let none = ConnTls::NotTerminated;
    let anonymous = ConnTls::Terminated { client: None };
    let as_dns = ConnTls::Terminated { client: Some(&dns) };
    let as_uri = ConnTls::Terminated { client: Some(&uri) };
    let suffix = |labels: &[&str]| identities(&[], vec![IdentitySuffix::from_labels(labels)]);
    for (authentication, expected) in [
        (Authentication::Unauthenticated, [Ok(()), Ok(()), Ok(()), Ok(())]),
        (
            Authentication::TlsUnauthenticated,
            [Err(Denied::NoTls), Ok(()), Ok(()), Ok(())],
        ),
        (
            Authentication::any_identity(),
            [Err(Denied::NoTls), Err(Denied::NoIdentity), Ok(()), Ok(())],
        ),
        (
            identities(&[dns.as_str()], vec![]),
            [
                Err(Denied::NoTls),
                Err(Denied::NoIdentity),
                Ok(()),
                Err(Denied::Identity),
            ],
        ),
        (
            identities(&[uri.as_str()], vec![]),
            [
                Err(Denied::NoTls),
                Err(Denied::NoIdentity),
                Err(Denied::Identity),
                Ok(()),
            ],
        ),
        (
            suffix(&["linkerd", "cluster", "local"]),
            [
                Err(Denied::NoTls),
                Err(Denied::NoIdentity),
                Ok(()),
                Err(Denied::Identity),
            ],
        ),
        (
            suffix(&["kerd", "cluster", "local"]),
            [
                Err(Denied::NoTls),
                Err(Denied::NoIdentity),
                Err(Denied::Identity),
                Err(Denied::Identity),
            ],
        ),
        (
            identities(&[], vec![]),
            [
                Err(Denied::NoTls),
                Err(Denied::NoIdentity),
                Err(Denied::Identity),
                Err(Denied::Identity),
            ],
        ),
    ] {
        let list = [Authorization::anywhere(
            authentication.clone(),
            Meta::default_named("x"),
        )];
        let found = [none, anonymous, as_dns, as_uri].map(|tls| check(&list, "10.0.0.1", tls).map(drop));
        assert_eq!(found, expected, "{authentication:?}");
    }
}

#[test]
fn a_suffix_matches_names_of_any_family_only_below_it() {
    let suffix = IdentitySuffix::from_labels(&["cluster", "local"]);
    let contains = |name: &str| suffix.contains(&name.parse().unwrap());
    assert!(contains("a.cluster.local"));
    assert!(!contains("cluster.local"));
    assert!(!contains("spiffe://a.cluster.local"));
}

#[test]
fn the_first_that_fits_permits_and_the_closest_denial_is_told() {
    let dns: Identity = "a.test".parse().unwrap();
    let list = [
        from("10.0.0.0/8", "", identities(&["b.test"], vec![])),
        from("10.0.0.0/16", "", Authentication::any_identity()),
        from("10.0.0.0/24", "", Authentication::Unauthenticated),
        Authorization::localhost(),
    ];
    let meshed = ConnTls::Terminated { client: Some(&dns) };
    assert_eq!(check(&list, "10.0.0.1", meshed), Ok("10.0.0.0/16".to_owned()));
    assert_eq!(
        check(&list, "10.0.0.1", ConnTls::NotTerminated),
        Ok("10.0.0.0/24".to_owned())
    );
    assert_eq!(check(&list, "10.1.0.1", meshed), Err(Denied::Identity));
    assert_eq!(check(&list, "10.1.0.1", ConnTls::NotTerminated), Err(Denied::NoTls));
    assert_eq!(check(&list, "::1", ConnTls::NotTerminated), Ok("localhost".to_owned()));
    assert_eq!(check(&[], "10.0.0.1", meshed), Err(Denied::Network));
}
