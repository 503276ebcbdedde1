//! Matches and filters of routes, for inbound and outbound.

/// A host, by its full name or by a suffix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostMatch {
    Exact(String),
    /// Labels from the right: `*.example.com` is `com`, `example`.
    Suffix(Vec<String>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpMatch {
    /// `None` matches all paths.
    pub path: Option<PathMatch>,
    pub headers: Vec<NamedMatch>,
    pub query_params: Vec<NamedMatch>,
    pub method: Option<String>,
}

impl HttpMatch {
    /// Matches all requests. It is a prefix match, so that every other match is more specific.
    pub fn match_all() -> Self {
        Self {
            path: Some(PathMatch::Prefix("/".to_owned())),
            ..Self::default()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathMatch {
    Exact(String),
    Prefix(String),
    Regex(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedMatch {
    pub name: String,
    pub value: ValueMatch,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueMatch {
    Exact(String),
    Regex(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrpcMatch {
    pub service: Option<String>,
    pub method: Option<String>,
    pub headers: Vec<NamedMatch>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    RequestHeaders(HeaderModifier),
    ResponseHeaders(HeaderModifier),
    Redirect(Redirect),
    UrlRewrite(UrlRewrite),
    Cors(Cors),
    /// Responds to every request with this status.
    FailHttp {
        status: u16,
        message: String,
    },
    /// Responds to every call with this gRPC code.
    FailGrpc {
        code: u16,
        message: String,
    },
    /// Closes every connection.
    FailStream {
        message: String,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderModifier {
    pub add: Vec<(String, String)>,
    pub set: Vec<(String, String)>,
    pub remove: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redirect {
    pub scheme: Option<String>,
    pub host: Option<String>,
    pub path: Option<PathModifier>,
    pub port: Option<u16>,
    pub status: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UrlRewrite {
    pub host: Option<String>,
    pub path: Option<PathModifier>,
}

/// Which cross-origin requests browsers may send. `*` stands for all values of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    pub allow_origins: Vec<String>,
    pub allow_credentials: bool,
    pub allow_methods: Vec<String>,
    pub allow_headers: Vec<String>,
    pub expose_headers: Vec<String>,
    pub max_age_seconds: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathModifier {
    Full(String),
    Prefix(String),
}
